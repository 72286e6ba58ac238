"""Reads weights from GGUF files: maps names, reorders rows and dequantizes where needed."""

import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.config import architecture_of
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.names import stored_names, with_gate_up, without_expert
from penstock.checkpoint.gguf.rope import IN_CONFIG, interleaved_rows
from penstock.errors import CheckpointError
from penstock.models.loading.gguf_scheme import scales_of_nvfp4
from penstock.models.loading.gguf_tensors import MadeTensor, made_tensors, xielu_tensors
from penstock.models.loading.loader import OpenWeights
from penstock.models.sizes import rotated_projections
from penstock.models.spec import ModelSpec

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class GGUFWeights:
    """The tensors of one GGUF file, under the names of the model's parameters."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        interleaved: Mapping[str, int],
        made: Mapping[str, MadeTensor],
    ) -> None:
        """
        Args:
            interleaved: matrices whose rows are permuted for interleaved RoPE, by name without `.weight` and `.bias`,
                with their head size.
            made: parameters that are computed from tensors, which may be in another file.
        """
        self.path, self._tensors, self._interleaved, self._made = path, tensors, interleaved, made
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: info.shape for name, info in tensors.items()},
            **{name: each.shape for name, each in made.items()},
        }

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        yield _Mapped(_content(self.path), self._tensors, self._interleaved, self._made)


def _content(path: Path) -> "NDArray[np.uint8]":
    try:
        with path.open("rb") as file:
            # private, so that torch takes it, which has no read-only memory; it is never written
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def whole_tensor(info: TensorInfo) -> "NDArray[np.float32]":
    """A whole tensor as float32, dequantized by the package `gguf`."""
    from gguf import GGMLQuantizationType, quants  # imported lazily

    stored = _content(info.file)[info.first : info.first + info.nbytes]
    made: NDArray[np.float32]
    if info.type.name in _FLOATS:
        made = stored.view(_FLOATS[info.type.name]).reshape(info.shape).astype(np.float32)
        return made
    rows = stored.reshape(*info.shape[:-1], -1)
    try:
        made = quants.dequantize(rows, GGMLQuantizationType[info.type.name])
        return made
    except (KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{info.file} stores its tensor {info.name} as {info.type.name}") from error


class _Mapped:
    def __init__(
        self,
        content: "NDArray[np.uint8]",
        tensors: Mapping[str, TensorInfo],
        interleaved: Mapping[str, int],
        made: Mapping[str, MadeTensor],
    ) -> None:
        self._content, self._tensors, self._interleaved, self._made = content, tensors, interleaved, made

    def read(self, name: str, first: int, last: int) -> "NDArray[Any]":
        """Rows of a quantized type as stored: uint8 [last - first, bytes of a row]."""
        if (made := self._made.get(name)) is not None:
            return np.ascontiguousarray(made.make(*map(whole_tensor, made.stored))[first:last])
        info = self._tensors[name]
        dtype = _FLOATS.get(info.type.name)
        if dtype is None and len(info.shape) == 1:
            raise CheckpointError(f"is a vector of type {info.type.name}; vectors are read as {', '.join(_FLOATS)}")
        rows = self._rows(info, first, last, self._interleaved.get(name.rpartition(".")[0]))
        return rows if dtype is None else rows.view(dtype).reshape(last - first, *info.shape[1:])

    def _rows(self, info: TensorInfo, first: int, last: int, head_dim: int | None) -> "NDArray[np.uint8]":
        """The bytes of rows `first` to `last` in the model's order: uint8 [last - first, row_bytes].

        Args:
            head_dim: the size of heads whose rows are interleaved; None: the rows are not interleaved.
        """
        row_bytes = info.nbytes // info.shape[0]
        stored = self._content[info.first : info.first + info.nbytes].reshape(info.shape[0], row_bytes)
        if head_dim is None:
            return stored[first:last]
        # llama.cpp's converter moved the rows for its RoPE; here they go back.
        return stored[interleaved_rows(np.arange(first, last), head_dim)]


def gguf_weight_files(file: GGUFFile, spec: ModelSpec, parameters: Iterable[str]) -> list[GGUFWeights]:
    """The weight files of a model, with tensors renamed to `parameters`; other tensors keep their names."""
    architecture, kind = architecture_of(file)
    parameters = list(parameters)
    stems = {without_expert(name.rpartition(".")[0]) for name in parameters}
    named = stored_names(architecture, stems, file.tensors)
    ours = {stored: with_gate_up(name) if "gate_up" in stored else name for name, stored in named.items()}
    made = {**made_tensors(spec, parameters, named, file.tensors), **xielu_tensors(file, parameters)}
    used = IN_CONFIG | {info.name for each in made.values() for info in each.stored} | scales_of_nvfp4(file)
    by_file: dict[Path, dict[str, TensorInfo]] = {path: {} for path in file.files}
    for name, info in file.tensors.items():
        if name not in used:
            stem, dot, part = name.rpartition(".")
            # An unknown tensor keeps its name, which may be that of a known one.
            if by_file[info.file].setdefault(f"{ours.get(stem, stem)}{dot}{part}", info) is not info:
                raise CheckpointError(f"{info.file} holds {name} twice, also as {ours.get(stem, stem)}{dot}{part}")
    interleaved = rotated_projections(spec) if kind.interleaved_rope else {}
    return [
        GGUFWeights(
            path,
            tensors,
            interleaved,
            {name: each for name, each in made.items() if (each.stored[0].file if each.stored else file.path) == path},
        )
        for path, tensors in by_file.items()
    ]
