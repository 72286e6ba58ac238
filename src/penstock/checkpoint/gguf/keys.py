"""The metadata keys of a GGUF file's architecture; records which keys have been read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.checkpoint.gguf.file import Metadata
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

T = TypeVar("T", bool, int, float, str)

_WITHOUT_EFFECT = {
    *("vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"),
    "classifier.output_labels",
}
"""Keys that repeat other information in the file."""

NULL = object()
"""Stands for null in `config.json`; a key whose value is None is left out."""


class Keys:
    """The keys with an architecture's prefix."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self._metadata, self._prefix = metadata, architecture + "."
        self._read = set(_WITHOUT_EFFECT)

    @property
    def file(self) -> Path:
        return self._metadata.file

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, or None if it is absent. Raises as `Metadata.find` does."""
        self._read.add(key)
        return self._metadata.find(self._prefix + key, kind)

    def need(self, key: str, kind: type[T]) -> T:
        """Like `find`, but raises if the key is absent."""
        self._read.add(key)
        return self._metadata.need(self._prefix + key, kind)

    def size(self, key: str, default: int | None = None, *, by_layer: bool) -> int:
        """The value of `key`, or `default` if it is absent or 0.

        The layers' values may be equal; with `by_layer` they may differ, and the largest is returned.
        """
        values = set(self.by_layer(key) or ()) if self.is_array(key) else set()
        found = max(values) if len(values) == 1 or (by_layer and values) else self.find(key, int)
        return self.need(key, int) if found is None and default is None else found or default or 0

    def by_layer(self, key: str) -> list[int] | None:
        """The integers or booleans of `key`, one per layer; None if it is absent."""
        self._read.add(key)
        values = self._metadata.numbers(self._prefix + key, "BbHhIiQq")
        return None if values is None else list(values)

    def floats(self, key: str) -> list[float] | None:
        """The numbers of `key`; None if it is absent."""
        self._read.add(key)
        values = self._metadata.numbers(self._prefix + key, "fd")
        return None if values is None else list(values)

    def is_array(self, key: str) -> bool:
        """Whether `key` has one value per layer."""
        return self._metadata.is_array(self._prefix + key)

    def expect(self, key: str, value: T) -> None:
        """Raise if `key` is present with another value."""
        given = self.find(key, type(value))
        if given is not None and given != value:
            raise self.unsupported(key, given, f"only {shown(value)} is")

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not affect the computation."""
        self._read.update(keys)

    def unsupported(self, key: str, given: object, supported: str) -> CheckpointError:
        return CheckpointError(
            f"{self._prefix}{key} {shown(given)} in {self._metadata.file} is not supported; {supported}"
        )

    def unread(self) -> list[str]:
        return [self._prefix + key for key in self._metadata.below(self._prefix) if key not in self._read]


@dataclass(frozen=True, slots=True)
class Given:
    """The input of a family's reader."""

    keys: Keys
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    """The `config.json` entries that all architectures have."""

    @property
    def num_layers(self) -> int:
        """Number of layers, without those of a multi-token prediction head."""
        return int(self.config["num_hidden_layers"])

    @property
    def has_mtp_head(self) -> bool:
        """Whether the file contains a multi-token prediction head; files may count its layer without storing it."""
        return f"blk.{self.num_layers}.nextn.eh_proj.weight" in self.tensors

    def layers_with(self, tensor: str) -> list[bool]:
        """For each layer, whether it has a tensor of this name."""
        return [f"blk.{index}.{tensor}" in self.tensors for index in range(self.num_layers)]

    def has(self, tensor: str) -> bool:
        """Whether any layer has a tensor of this name."""
        return any(self.layers_with(tensor))


def layer_norm_eps(given: Given) -> dict[str, Any]:
    """The epsilon of the norms under the key of layer norms."""
    return {"layer_norm_eps": given.config["rms_norm_eps"], "rms_norm_eps": None}
