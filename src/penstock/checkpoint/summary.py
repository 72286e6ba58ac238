"""A model in a few words and numbers, from the headers of its files."""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import datetime, timezone
from pathlib import Path

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint, weight_files
from penstock.checkpoint.created import version_of
from penstock.checkpoint.safetensors import read_header
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError

_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"), (1, ""))
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Names of GGUF's metadata, and those of config.json."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's family, format and sizes."""

    format: str = ""
    """gguf or safetensors."""
    family: str = ""
    num_parameters: int | None = None
    """None: unknown, as for weights packed in integers."""
    quantization: str = ""
    """The format that holds most parameters, such as Q4_K or BF16."""
    num_bytes: int = 0
    """Of the weights."""
    modified: datetime = _EPOCH
    digest: str = hashlib.sha256().hexdigest()
    """Of the names, sizes and times of the files."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """By the names of GGUF's metadata."""

    @property
    def parameters(self) -> str:
        """The number of parameters, such as 596.0M; empty if unknown."""
        if self.num_parameters is None:
            return ""
        size, unit = next((size, unit) for size, unit in _UNITS if self.num_parameters >= size or size == 1)
        return f"{self.num_parameters / size:.1f}{unit}" if unit else str(self.num_parameters)


def summary_of(path: str, hf_overrides: str | None = None) -> ModelSummary:
    """The summary of the model at a path; an empty one if its files are not on this machine. Reads files."""
    return _summary_of(path, hf_overrides, version_of(Path(path)))


@functools.lru_cache(maxsize=64)
def _summary_of(path: str, hf_overrides: str | None, _version: str) -> ModelSummary:
    try:
        return summarize(open_checkpoint(path, hf_overrides=hf_overrides))
    except (CheckpointError, OSError):
        return ModelSummary()


def summarize(checkpoint: Checkpoint) -> ModelSummary:
    """
    Raises:
        CheckpointError: the weights are missing or damaged.
    """
    files = list(checkpoint.gguf.files) if checkpoint.gguf else weight_files(checkpoint.path)
    stats = [file.stat() for file in files]
    num_parameters, quantization = _stored(checkpoint, files)
    identity = [(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]
    config = checkpoint.config.get("text_config") or checkpoint.config
    sizes = {name: config.get(key) for name, key in _SIZES.items()}
    return ModelSummary(
        format="gguf" if checkpoint.gguf else "safetensors",
        family=_family(checkpoint),
        num_parameters=num_parameters,
        quantization=quantization,
        num_bytes=sum(stat.st_size for stat in stats),
        modified=datetime.fromtimestamp(max(stat.st_mtime for stat in stats), timezone.utc),
        digest=hashlib.sha256(json.dumps([str(checkpoint.path), identity]).encode()).hexdigest(),
        sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
    )


def _family(checkpoint: Checkpoint) -> str:
    if checkpoint.gguf is not None:
        return checkpoint.gguf.metadata.find("general.architecture", str) or ""
    return str(checkpoint.config.get("model_type") or "")


def _stored(checkpoint: Checkpoint, files: Sequence[Path]) -> tuple[int | None, str]:
    """Number of parameters, and the name of the format that holds most of them."""
    held: Counter[str] = Counter()
    if checkpoint.gguf is not None:
        for stored in checkpoint.gguf.tensors.values():
            held[stored.type.name] += stored.size
    else:
        quantized = checkpoint.config.get("quantization_config")
        if isinstance(quantized, dict):
            return None, str(quantized.get("quant_method") or "").upper()
        for file in files:
            for tensor in read_header(file).values():
                held[tensor.dtype] += math.prod(tensor.shape)
    return sum(held.values()), max(held, key=lambda name: held[name], default="")
