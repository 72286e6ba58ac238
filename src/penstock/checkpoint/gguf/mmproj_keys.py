"""The input of readers of llama.cpp's `mmproj` files: an encoder's keys and tensors, and the text model's config."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from penstock.checkpoint.gguf.file import Metadata
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.keys import Keys
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError

Section = Literal["vision", "audio"]
"""An encoder of a file; its keys begin with `clip.` and this name, its tensors with the first letter."""
EncoderSettings = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""What a projector's reader finds: entries of `config.json`, its section of the encoder, the processor's settings."""
_LARGEST = 2**26
"""Largest size that is plausible."""
_MEDIA = {"vision": "images", "audio": "sounds"}


@dataclass(frozen=True, slots=True)
class GivenEncoder:
    """The input of a projector's reader."""

    section: Section
    keys: Keys
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    text: Mapping[str, Any]
    vocabulary: Metadata
    """Of the text model's file."""

    def token(self, *texts: str) -> int:
        """The id of the first of these tokens that the text model's vocabulary has.

        Raises:
            CheckpointError: it has none of them.
        """
        tokens = self.vocabulary.string_array("tokenizer.ggml.tokens")
        found = next((token for text in texts if tokens and (token := tokens.find(text)) is not None), None)
        if found is None:
            missing, media = " or ".join(texts), _MEDIA[self.section]
            raise CheckpointError(f"the vocabulary of {self.vocabulary.file} lacks {missing}, which {media} need")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        """
        Raises:
            CheckpointError: the value is missing, or not plausible.
        """
        key = f"{self.section}.{key}"
        found = self.keys.need(key, int) if default is None else self.keys.find(key, int)
        if found is None:
            assert default is not None
            return default
        if not 1 <= found <= _LARGEST:
            raise self.keys.unsupported(key, found, f"it must be from 1 to {_LARGEST}")
        return found

    def num_layers(self) -> int:
        """
        Raises:
            CheckpointError: the file has fewer blocks.
        """
        count = self.size("block_count")
        if count > len(self.tensors) or f"{self.section[0]}.blk.{count - 1}.ln1.weight" not in self.tensors:
            raise self.keys.unsupported(
                f"{self.section}.block_count", count, "the file has the tensors of fewer blocks"
            )
        return count

    def shape(self, tensor: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor, without leading axes of size 1.

        Raises:
            CheckpointError: it is missing, or has another number of axes.
        """
        info = self.tensors.get(tensor)
        if info is None:
            raise CheckpointError(f"{self.keys.file} lacks the tensor {tensor}")
        shape = info.shape
        while len(shape) > axes and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != axes:
            raise CheckpointError(
                f"{tensor} in {self.keys.file} has the shape {list(info.shape)}; {axes} axes are read"
            )
        return shape

    def epsilon(self) -> float | None:
        """Epsilon of the norms."""
        return self.keys.find(f"{self.section}.attention.layer_norm_epsilon", float)

    def expect_epsilon(self, wanted: float) -> None:
        """
        Raises:
            CheckpointError: the epsilon of norms is not that which `transformers` has in its code for this encoder.
        """
        eps = self.epsilon() or wanted
        if not math.isclose(eps, wanted, rel_tol=1e-6):  # a float32 in the file
            raise self.keys.unsupported(f"{self.section}.attention.layer_norm_epsilon", eps, f"only {wanted} is")

    def numbers(self, key: str) -> list[float] | None:
        values = self.metadata.numbers(f"clip.{self.section}.{key}", "fd")
        return None if values is None else list(values)
