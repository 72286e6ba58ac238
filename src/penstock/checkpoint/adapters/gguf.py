"""LoRA adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them. No torch.

general.type                      adapter; adapter.type is lora, adapter.lora.alpha the scale times the rank
blk.0.attn_q.weight.lora_a        [rank, columns]: A; its B is lora_b [rows, rank], in the order of the file's rows
blk.0.ffn_up_exps.weight.lora_a   [experts, rank, columns]; lora_b [experts, rows, rank]
token_embd.weight.lora_a          [vocabulary, rank], transposed; lora_b [columns, rank]
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.adapters.adaptable import Adaptable, AdaptedMap
from penstock.checkpoint.adapters.peft import LARGEST_SCALE, MAX_RANK
from penstock.checkpoint.adapters.weights import check_values
from penstock.checkpoint.gguf.architectures import ARCHITECTURES
from penstock.checkpoint.gguf.file import Metadata, open_gguf
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.names import stored_names
from penstock.checkpoint.gguf.rope import interleaved_rows
from penstock.checkpoint.safetensors import numpy_type
from penstock.dataclass import dataclass
from penstock.errors import AdapterError, shown

_TENSOR = re.compile(r"(?P<stem>.+)\.weight\.lora_(?P<part>[ab])")
_FLOATS = ("F32", "F16", "BF16")
_TYPES = (*_FLOATS, "Q8_0")
_REWRITTEN = {
    **dict.fromkeys(("bloom", "falcon", "gptneox"), r"blk\.\d+\.attn_qkv"),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), r"blk\.\d+\.(attn_qkv|attn_gate|ssm_.*)"),
    **dict.fromkeys(("falcon-h1", "gpt2", "starcoder"), ".*"),
}
"""Matrices that GGUF files have in another form than folders do, by architecture; not undone for adapters."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A or B in the file."""

    info: TensorInfo
    shape: tuple[int, int]
    expert: int = 0
    head_dim: int | None = None
    """Size of heads whose rows are interleaved."""
    transposed: bool = False

    def read(self) -> NDArray[Any]:
        """
        Raises:
            AdapterError: the file has become shorter.
        """
        rows, _ = self.shape
        nbytes = rows * self.info.row_bytes
        with self.info.file.open("rb") as file:  # not mapped: the server would die of a file that becomes shorter
            file.seek(self.info.first + self.expert * nbytes)
            content = np.frombuffer(file.read(nbytes), np.uint8)
        if len(content) < nbytes:
            raise AdapterError(f"{self.info.file} has become shorter while it was read")
        values = _decoded(content, self.info.type.name, self.shape)
        if self.head_dim is not None:
            values = values[interleaved_rows(np.arange(rows), self.head_dim)]
        return np.ascontiguousarray(values.T) if self.transposed else values


@dataclass(frozen=True, slots=True)
class GGUFAdapter:
    """A GGUF adapter that was checked against the model."""

    maps: tuple[AdaptedMap, ...]
    num_elements: int
    parts: Mapping[str, _Part]
    """A and B of each map, by their names in the map."""

    def read(self, name: str) -> NDArray[Any]:
        """A or B of a map. Raises as `_Part.read` does."""
        return self.parts[name].read()


def read_gguf_adapter(file: Path, model: Adaptable) -> GGUFAdapter:
    """Check a GGUF adapter.

    Raises:
        CheckpointError: the file is damaged.
        AdapterError: it does not match the model, or requires an unsupported feature.
    """
    opened = open_gguf(file, ("adapter",))
    if len(opened.files) > 1:  # the adapter's digest would cover only the first
        raise AdapterError(f"it is split into {len(opened.files)} files: merge them, as llama-gguf-split --merge does")
    architecture, alpha = _read_settings(opened.metadata)
    if model.architecture not in (None, architecture):
        raise AdapterError(f"it is for the architecture {architecture}; the model's is {model.architecture}")
    pairs = _pairs(opened.tensors)
    names = _names(architecture, model)
    maps: list[AdaptedMap] = []
    parts: dict[str, _Part] = {}
    for stem, (a, b) in pairs.items():
        if stem not in names or re.fullmatch(_REWRITTEN.get(architecture, ""), stem):
            raise AdapterError(_why_not(stem, architecture, names))
        interleaved = ARCHITECTURES[architecture].interleaved_rope
        for adapted, of_map in _terms(stem, a, b, names[stem], model, alpha, interleaved=interleaved):
            maps.append(adapted)
            parts |= zip(adapted.stored_names, of_map, strict=True)
    if not maps:
        raise AdapterError("it has no weights")
    for name, part in parts.items():
        check_values(name, part.read(), model.dtype)
    return GGUFAdapter(tuple(maps), sum(a.size + b.size for a, b in pairs.values()), parts)


def _read_settings(metadata: Metadata) -> tuple[str, float]:
    """The architecture, and alpha; 0: the scale is 1."""
    kind = metadata.find("adapter.type", str)
    if kind != "lora":
        raise AdapterError(f"adapter.type is {shown(kind)}; only lora is supported")
    if metadata.numbers("adapter.alora.invocation_tokens", "iIqQ"):
        raise AdapterError("it has adapter.alora.invocation_tokens: adapters that begin at a token are not supported")
    architecture = metadata.need("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise AdapterError(f"it is for the architecture {shown(architecture)}, which is not supported in GGUF files")
    alpha = metadata.find("adapter.lora.alpha", float) or 0.0
    if abs(alpha) > LARGEST_SCALE:
        raise AdapterError(f"adapter.lora.alpha is {alpha:g}, which is too large")
    return architecture, alpha


def _pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """A and B by the name of their matrix in the file, without `.weight`."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        tensor = _TENSOR.fullmatch(name)
        if tensor is None:
            raise AdapterError(f"it has {shown(name)}, which is not a LoRA weight of a linear map")
        if info.type.name not in _TYPES:
            raise AdapterError(f"{shown(name)} is of type {info.type.name}; {', '.join(_TYPES)} are supported")
        found.setdefault(tensor["stem"], {})[tensor["part"]] = info
    for stem, parts in found.items():
        if len(parts) < 2:
            (there,) = parts
            other = "b" if there == "a" else "a"
            raise AdapterError(f"it has lora_{there} of {shown(stem)}, but no lora_{other} of it")
    return {stem: (parts["a"], parts["b"]) for stem, parts in found.items()}


def _names(architecture: str, model: Adaptable) -> dict[str, str]:
    """The model's linear maps, embeddings and experts (by that of the first), by their names in GGUF files."""
    experts = [f"{prefix}.0.{name}" for prefix, experts in model.experts.items() for name in experts.maps]
    stored = stored_names(architecture, [*model.matrices, *model.embeddings, *experts])
    return {gguf: name for name, gguf in stored.items()}


def _terms(
    stem: str, a: TensorInfo, b: TensorInfo, name: str, model: Adaptable, alpha: float, *, interleaved: bool
) -> Iterator[tuple[AdaptedMap, tuple[_Part, _Part]]]:
    """The terms of a pair: one, or one for each expert, with their A and B."""
    if name in model.embeddings:
        rows, columns = model.embeddings[name]
        rank = a.shape[-1]
        _check_shapes(a, b, (rows, rank), (columns, rank), rank)
        adapted = AdaptedMap(name, stem, rank, alpha / rank if alpha else 1.0, "embedding")
        yield adapted, (_Part(a, (rows, rank), transposed=True), _Part(b, (columns, rank)))
        return
    prefix, _, of_expert = name.rpartition(".0.")
    experts = model.experts.get(prefix)
    rows, columns = model.matrices[name] if experts is None else experts.maps[of_expert]
    rank = b.shape[-1]
    stacked = () if experts is None else (experts.count,)
    _check_shapes(a, b, (*stacked, rank, columns), (*stacked, rows, rank), rank)
    head_dim = model.rotated.get(name) if interleaved else None
    for expert in range(1 if experts is None else experts.count):
        matrix, module = (name, stem) if experts is None else (f"{prefix}.{expert}.{of_expert}", f"{stem}.{expert}")
        parts = _Part(a, (rank, columns), expert), _Part(b, (rows, rank), expert, head_dim)
        yield AdaptedMap(matrix, module, rank, alpha / rank if alpha else 1.0), parts


def _check_shapes(a: TensorInfo, b: TensorInfo, of_a: tuple[int, ...], of_b: tuple[int, ...], rank: int) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"{b.name} has the rank {rank}; ranks from 1 to {MAX_RANK} are supported")
    for info, wanted in ((a, of_a), (b, of_b)):
        if info.shape != wanted:
            raise AdapterError(f"{info.name} has the shape {list(info.shape)}; the model asks for {list(wanted)}")


def _why_not(stem: str, architecture: str, names: Mapping[str, str]) -> str:
    if stem in names:
        return f"it adds to {stem}, which GGUF files of {architecture} have in another form: give it in PEFT's form"
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return (
        f"it adds to {shown(stem)} of the architecture {architecture}, which this model does not have, or not as a "
        f"linear map that adapters may add to ({', '.join(kinds)})"
    )


def _decoded(content: NDArray[np.uint8], kind: str, shape: tuple[int, int]) -> NDArray[Any]:
    if kind in _FLOATS:
        return content.view(numpy_type(kind)).reshape(shape)
    blocks = content.reshape(-1, 34)  # Q8_0: a scale in float16, and 32 integers
    scales: NDArray[Any] = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    values: NDArray[Any] = (scales * blocks[:, 2:].view(np.int8)).reshape(shape)
    return values
