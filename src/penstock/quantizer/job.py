"""The steps of `penstock quantize`, in a folder beside the target, from which a later call resumes.

OUT.partial/   job.json           inputs and options; a run with different ones does not resume this job
               calibration.json   the calibration texts
               layer-00003.safetensors
OUT/           the same folder, renamed at the end
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import __version__
from penstock.checkpoint.checkpoint import Checkpoint, weight_files
from penstock.checkpoint.safetensors import read_header
from penstock.config.recipes import CHECKPOINT_RECIPES, PACKED, CheckpointRecipe, PackedMatrix
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.ops import Ops
from penstock.layers.attention import AttentionSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.models.sizes import model_sizes
from penstock.models.spec import ModelSpec
from penstock.quantization.gptq import fit_grid, round_with_feedback
from penstock.quantization.scheme import HINT
from penstock.quantizer.layerwise import Layerwise
from penstock.quantizer.packed import packed_tensors, quantization_config, unpacked

logger = logging.getLogger(__name__)

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
_JOB, _TEXTS = "job.json", "calibration.json"


@dataclass(frozen=True, slots=True)
class Job:
    """Source, target and recipe of a quantization."""

    checkpoint: Checkpoint
    spec: ModelSpec
    recipe_name: str
    out: Path
    calibration: Path | None
    """A text file; None: the model writes the texts."""

    @property
    def recipe(self) -> CheckpointRecipe:
        return CHECKPOINT_RECIPES[self.recipe_name]

    def kind(self, name: str) -> PackedMatrix:
        """The storage format of the layers' matrices."""
        return PACKED[self.recipe.layers.format_of(name).name]

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    def check(self) -> None:
        """
        Raises:
            ConfigError: the target exists or cannot be created, or its disk has too little room.
            CheckpointError: this checkpoint cannot be quantized.
        """
        if self.checkpoint.gguf is not None:
            raise CheckpointError(
                f"{self.checkpoint.path} is a GGUF file; quantize needs a folder with config.json and safetensors files"
            )
        if self.spec.quantization is not None:
            raise CheckpointError(f"{self.checkpoint.path} is quantized already")
        parts = [part for layer in self.spec.layers for part in layer.parts]
        shared = any(isinstance(part, AttentionSpec) and part.shared is not None for part in parts)
        if shared or not all(isinstance(part, (AttentionSpec, GatedMLPSpec)) for part in parts):
            raise CheckpointError(f"{self.checkpoint.path} is of a family that quantize does not support")
        for matrix in model_sizes(self.spec).matrices:
            if matrix.columns % 32 or matrix.rows % 8:
                raise CheckpointError(
                    f"{matrix.name} has {matrix.rows} rows of {matrix.columns}: quantize needs a multiple of 8 rows, "
                    "and of 32 columns"
                )
        self._check_new()
        if self.out.name == "..":
            raise ConfigError(f"{self.out} cannot be written; give the name of a new folder")
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {self.partial.parent} cannot be made: {error.strerror}") from None
        free, needed = (
            shutil.disk_usage(self.partial.parent).free,
            sum(_size(f) for f in weight_files(self.checkpoint.path)),
        )
        if free < needed:
            raise ConfigError(f"{self.out.parent} has {free >> 20} MiB free; quantizing may take {needed >> 20}")

    def _check_new(self) -> None:
        if os.path.lexists(self.out):
            raise ConfigError(f"{self.out} exists; name a folder that does not, or remove it")

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Create or resume the folder, which is locked until the context ends.

        Raises:
            ConfigError: the folder belongs to another job, is in use by another call, or cannot be created.
        """
        said = json.dumps(self._identity(), indent=1)
        file = self.partial / _JOB
        with self._locked_folder():
            self._check_new()  # another call may have just written it
            if not any(self.partial.iterdir()):
                _write(file, said)
            elif not file.is_file() or file.read_bytes() != said.encode():
                raise ConfigError(
                    f"{self.partial} is left from another call of quantize, or the model has changed since; remove it"
                )
            yield

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        try:
            self.partial.mkdir(exist_ok=True)
            descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"the folder {self.partial} cannot be made: {error.strerror}") from None
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another call of quantize is writing {self.partial}; wait for its end, or name another folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"the folder {self.partial} cannot be locked: {error.strerror}") from None

    def _identity(self) -> dict[str, Any]:
        files = [(f.name, _size(f), f.stat().st_mtime_ns) for f in weight_files(self.checkpoint.path)]
        return {
            "version": __version__,
            "checkpoint": str(self.checkpoint.path),
            "files": [list(file) for file in files],
            "copied": {file.name: _digest(file) for file in self._copied_files()},
            "recipe": self.recipe_name,
            "calibration": self.calibration and _digest(self.calibration),
        }

    def _copied_files(self) -> list[Path]:
        """The config, tokenizer and other small files that are copied from the source."""
        found = [file for pattern in _COPIED for file in sorted(self.checkpoint.path.glob(pattern)) if file.is_file()]
        return [file for file in found if not file.name.endswith(".safetensors.index.json")]

    def texts(self, make: Callable[[], list[list[int]]]) -> list[list[int]]:
        """The calibration texts of an earlier call; `make` creates them if there are none, or they are damaged."""
        file = self.partial / _TEXTS
        with _reading_again(file), contextlib.suppress(FileNotFoundError):
            kept: list[list[int]] = json.loads(file.read_text())
            return kept
        texts = make()
        _write(file, json.dumps(texts))
        return texts

    def layers(self, texts: list[list[int]], ops: Ops) -> Iterator[int]:
        """Quantize layer by layer; yields the index of each finished layer.

        Raises:
            CheckpointError: a tensor is missing, damaged, or has weights that are not finite.
            ConfigError: a file cannot be written.
        """
        with torch.inference_mode():
            walk = Layerwise(self.checkpoint, self.spec, ops, texts)
            for index in range(self.spec.num_layers):
                file = self.partial / f"layer-{index:05d}.safetensors"
                kept = self._kept_layer(file)
                if kept is None:
                    self._round_layer(walk, file)
                else:
                    walk.skip(kept)
                yield index

    def _kept_layer(self, file: Path) -> dict[str, Tensor] | None:
        """The quantized matrices of a layer from an earlier call; None if they are missing or damaged."""
        with _reading_again(file):
            return self._rounded(load_file(file)) if file.is_file() else None
        return None

    def _round_layer(self, walk: Layerwise, file: Path) -> None:
        tensors: dict[str, Tensor] = {}
        dtype = getattr(torch, self.spec.dtype)

        def round_matrix(name: str, weight: Tensor, gram: Tensor) -> Tensor:
            for tensor, what in ((weight, "weights"), (gram, "inputs, on the calibration texts,")):
                if not bool(tensor.isfinite().all()):
                    raise CheckpointError(f"{name} has {what} that are infinite or not numbers")
            kind = self.kind(name)
            importance = gram.diagonal() / gram.diagonal().mean().clamp_min(1e-30)
            grid = fit_grid(weight, importance, kind.used_bits, kind.group, symmetric=kind.symmetric)
            q = round_with_feedback(weight, gram, grid)
            tensors.update(packed_tensors(name, q, grid, dtype, kind))
            return unpacked(name, tensors, kind)

        walk.advance(round_matrix)
        _save(tensors, file)

    def _rounded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The dequantized matrices of a layer's file."""
        names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
        return {name: unpacked(name, tensors, self.kind(name)) for name in names}

    def finish(self) -> None:
        """Copy the tensors that are not quantized, write the config, and rename the folder.

        Raises:
            ConfigError: a file cannot be written.
        """
        self._save_rest()
        weight_map = {}
        files = sorted(self.partial.glob("*.safetensors"))
        for file in files:
            weight_map.update(dict.fromkeys(read_header(file), file.name))
        index = {"metadata": {"total_size": sum(map(_size, files))}, "weight_map": weight_map}
        for file in self._copied_files():
            _copy(file, self.partial / file.name)
        _write(self.partial / "model.safetensors.index.json", json.dumps(index, indent=1))
        hint = {"layers": dict(self.recipe.layers.choices), "embeddings": self.recipe.embeddings}
        said = {**self.checkpoint.config, "quantization_config": quantization_config(self.recipe), HINT: hint}
        _write(self.partial / "config.json", json.dumps(said, indent=1))
        try:
            self.partial.rename(self.out)
        except OSError as error:
            raise ConfigError(f"{self.partial} cannot be renamed to {self.out}: {error.strerror}") from None
        (self.out / _JOB).unlink()
        (self.out / _TEXTS).unlink()

    def describe(self) -> str:
        """The written folder, its size and its bits per weight, in a line."""
        size = sum(map(_size, self.out.glob("*.safetensors")))
        files = weight_files(self.checkpoint.path)
        num_weights = sum(math.prod(tensor.shape) for file in files for tensor in read_header(file).values())
        return f"{self.out}: {size / 2**20:,.1f} MiB, {8 * size / num_weights:.2f} bits a weight"

    def _save_rest(self) -> None:
        rounded = {f"{matrix.name}.weight" for matrix in model_sizes(self.spec).matrices} - self._embeddings()
        for file in weight_files(self.checkpoint.path):
            with safe_open(file, "pt") as opened:
                rest = {name: opened.get_tensor(name) for name in set(opened.keys()) - rounded}
            if rest:
                _save(rest, self.partial / f"rest-{file.name}")

    def _embeddings(self) -> set[str]:
        names = self.spec.names
        return {f"{names.embedding}.weight", f"{names.output}.weight"}


def _size(file: Path) -> int:
    return file.stat().st_size


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _reading_again(file: Path) -> Iterator[None]:
    """Ends the block with a warning if the file of an earlier call cannot be read."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        logger.warning("%s is damaged and will be computed again: %s", file, error)


def _write(file: Path, text: str) -> None:
    _publish(file, lambda draft: draft.write_text(text))


def _copy(source: Path, file: Path) -> None:
    _publish(file, lambda draft: shutil.copyfile(source, draft))


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    _publish(file, lambda draft: save_file(tensors, draft, metadata={"format": "pt"}))


def _publish(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all, even if the power fails.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = file.with_name(file.name + ".draft")
    try:
        draft.touch()
        mode = stat.S_IMODE(draft.stat().st_mode)
        write(draft)
        draft.chmod(mode)  # as the umask says: safetensors makes files that only their owner can read
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, file)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError(
            f"{file} cannot be written: {error}; the same command resumes there when that is mended"
        ) from None
