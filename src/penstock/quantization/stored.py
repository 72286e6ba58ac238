"""What the formats of quantized checkpoints share: one class for each in `stored_*.py`."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from penstock.config.weight_formats import FLOAT, WeightFormat
from penstock.quantization.parameters import FloatRows
from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import StoredScheme

SchemeT = TypeVar("SchemeT", bound=StoredScheme)


class StoredMatrices(ABC, Generic[SchemeT]):
    """A `Method` that loads matrices as the checkpoint stores them, quantized or floating point, without rounding."""

    quantizes_on_load = False

    def __init__(self, scheme: SchemeT) -> None:
        self._scheme = scheme

    def format_of(self, name: str) -> WeightFormat:
        return self._scheme.format_of(name)

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        if weight.format is FLOAT:
            return {f"{name}.weight": FloatRows(weight, first, count)}
        return self._quantized(weight, name, first, count)

    @abstractmethod
    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        """As `parameters`, for a quantized matrix."""
