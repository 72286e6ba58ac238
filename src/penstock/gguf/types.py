"""How GGUF files store a tensor's elements: the types of ggml, as the package `gguf` lists them."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class TensorType:
    """One of ggml's types: columns of a row in blocks of equal size."""

    name: str
    """As ggml writes it: F16, Q4_K."""
    block_columns: int
    block_bytes: int


def tensor_type(type_id: int) -> TensorType | None:
    """The type of this id; None: there is none that is known."""
    return _known_types().get(type_id)


@cache
def _known_types() -> dict[int, TensorType]:
    from gguf.constants import GGML_QUANT_SIZES  # imported when used: it imports numpy

    return {int(known): TensorType(known.name, *size) for known, size in GGML_QUANT_SIZES.items()}
