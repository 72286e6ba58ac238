"""ggml's tensor types, from the table of the package `gguf`."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ggml tensor type, which stores the columns of a row in blocks of equal size."""

    name: str
    """ggml's name, such as F16 or Q4_K."""
    block_columns: int
    block_bytes: int


def tensor_type(type_id: int) -> TensorType | None:
    """The type with this id, or None if it is unknown."""
    return _known_types().get(type_id)


@cache
def _known_types() -> dict[int, TensorType]:
    from gguf.constants import GGML_QUANT_SIZES  # imported lazily: it imports numpy

    return {int(known): TensorType(known.name, *size) for known, size in GGML_QUANT_SIZES.items()}
