"""An adapter's folder: `adapter_config.json` and `adapter_model.safetensors`, checked against a model."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.api.request import Adapter
from penstock.checkpoint.adapters.peft import CONFIG_FILE, PeftConfig
from penstock.checkpoint.adapters.weights import WEIGHTS_FILE, check_finite, read_adapter_header
from penstock.checkpoint.hub_cache import cached_folder, hub_answers
from penstock.config.model_facts import DType
from penstock.errors import AdapterError, ConfigError, shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_LARGEST_SCALE = 3.4e38
"""About the largest float32."""
_NAME = re.compile(r"[^\s,=/][^\s,=]{0,199}")


@dataclass(frozen=True, slots=True)
class Adaptable:
    """The linear maps of a model that adapters may modify."""

    matrices: dict[str, tuple[int, int]]
    """(rows, columns) of each linear map, by its name in the model."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Replacements of name prefixes, as in `ModelNames`."""
    dtype: DType = "float32"
    """The dtype to which adapter weights are converted."""

    def name_of(self, module: str) -> str:
        """The name in the model of a module that PEFT names `module`."""
        for stored, ours in self.prefixes:
            if module.startswith(stored):
                return ours + module.removeprefix(stored)
        return module


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """An adapter's term for one linear map: scale * B (A x)."""

    matrix: str
    """Name of the linear map in the model."""
    module: str
    """Name of the linear map in the file, where `.lora_A.weight` and `.lora_B.weight` follow it."""
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter that was checked against the model."""

    adapter: Adapter
    maps: tuple[AdaptedMap, ...]

    @property
    def weights(self) -> Path:
        return Path(self.adapter.path, WEIGHTS_FILE)


def adapter_path(path: str) -> Path:
    """The folder of an adapter: a local folder, or the download of a hub id.

    Raises:
        AdapterError: it is neither, or cannot be downloaded.
    """
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or _HUB_ID.fullmatch(path) is None:
        raise AdapterError(f"there is no folder {path}: give one that contains {CONFIG_FILE}, or a hub id")
    from huggingface_hub import snapshot_download  # imported when used: it takes a quarter of a second

    try:
        if not hub_answers() and (cached := cached_folder(path, None)) is not None:
            return cached
        return Path(snapshot_download(path, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except Exception as error:  # network, authentication, disk, a bad id: each has its own type
        raise AdapterError(
            f"{path} is not a local folder, and could not be downloaded from the Hugging Face hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_name(name: str) -> None:
    """
    Raises:
        AdapterError: the name contains characters with which requests could not select the adapter.
    """
    if _NAME.fullmatch(name) is None:
        raise AdapterError(f"an adapter's name must not contain spaces, commas or equals signs, as {shown(name)} does")


def read_adapter(name: str, path: str, model: Adaptable) -> AdapterFolder:
    """Check an adapter's folder.

    Raises:
        AdapterError: it is incomplete, damaged, does not match the model or requires an unsupported feature; the
            message names the adapter.
    """
    check_name(name)
    try:
        folder = adapter_path(path)
        config = PeftConfig.read(folder)
        file = folder / WEIGHTS_FILE
        if not file.is_file():
            raise AdapterError(f"{folder} has no {WEIGHTS_FILE}; other formats are not supported")
        tensors = read_adapter_header(file)
        maps = _maps(config, {name: tensor.shape for name, tensor in tensors.items()}, model)
        check_finite(file, tensors, model.dtype)
        elements = sum(adapted.rank * sum(model.matrices[adapted.matrix]) for adapted in maps)
        return AdapterFolder(Adapter(name, str(folder), _digest(folder), elements), maps)
    except ConfigError as error:
        raise AdapterError(f"the adapter {name!r} cannot be used: {error}") from None
    except OSError as error:
        raise AdapterError(f"the adapter {name!r} cannot be read: {error}") from None


def _digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    with (folder / WEIGHTS_FILE).open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:32]


def _maps(config: PeftConfig, shapes: Mapping[str, tuple[int, ...]], model: Adaptable) -> tuple[AdaptedMap, ...]:
    """The adapter's term for each linear map.

    Raises:
        AdapterError: the file lacks a tensor that the config requires, or has others.
    """
    found: dict[str, AdaptedMap] = {}
    for name in sorted(shapes):
        tensor = _TENSOR.fullmatch(name)
        if tensor is None:
            raise AdapterError(f"it has {name}, which is not a LoRA weight of a linear map")
        module = tensor["module"].removeprefix(_PREFIX)
        matrix = model.name_of(module)
        if matrix not in model.matrices:
            raise AdapterError(f"it adds to {module}, which {_why_not(matrix, model)}")
        rank, scale = config.rank_of(module), config.scale_of(module)
        rows, columns = model.matrices[matrix]
        wanted = {"A": (rank, columns), "B": (rows, rank)}
        if shapes[name] != wanted[tensor["part"]]:
            raise AdapterError(
                f"{name} has the shape {list(shapes[name])}; the model, and the rank {rank} of {CONFIG_FILE}, ask "
                f"for {list(wanted[tensor['part']])}"
            )
        other = f"{tensor['module']}.lora_{'B' if tensor['part'] == 'A' else 'A'}.weight"
        if other not in shapes:
            raise AdapterError(f"it has {name}, but no {other}")
        other_module = found.setdefault(matrix, AdaptedMap(matrix, tensor["module"], rank, scale)).module
        if other_module != tensor["module"]:
            raise AdapterError(f"it has {other_module} and {tensor['module']}, which are the same linear map")
        if not abs(scale) <= _LARGEST_SCALE:
            raise AdapterError(f"the scale of {module} is {scale:g}: lora_alpha of {CONFIG_FILE} is too large")
    missing = [matrix for matrix in model.matrices if matrix not in found and config.has(matrix)]
    if missing:
        raise AdapterError(f"target_modules names {missing[0]}, for which the file has no weights")
    if not found:
        raise AdapterError("it has no weights")
    return tuple(found.values())


def _why_not(matrix: str, model: Adaptable) -> str:
    last = matrix.rpartition(".")[2]
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in model.matrices))
    if any(name.rpartition(".")[2] == last for name in model.matrices):
        return f"this model does not have, or not as a linear map that adapters may add to ({kinds} of its layers)"
    return f"adapters cannot add to here; they can to {kinds} of the layers" if kinds else "adapters cannot add to here"
