"""A convolution over the tokens of whole texts, as a linear map of neighbouring tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from penstock.checkpoint.encoder_config import HeadActivation
from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.spec import NormSpec

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.quantization.base import WeightFactory

_VECTOR = 64
"""Columns of the matrix are a multiple of this, which kernels read whole; the others are zeros."""


@dataclass(frozen=True, slots=True)
class TokenConvolutionSpec:
    """activation(convolution(x)), with a bias; beyond the ends of a text there are zeros."""

    name: str
    """In the checkpoint, without `.weight`."""
    size: int
    width: int
    """Number of tokens that a result depends on, its own in the middle."""
    activation: HeadActivation
    norm_of_sum: NormSpec
    """Norm of the sum of its result and the first layer's output."""

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return -(-self.width * self.size // _VECTOR) * _VECTOR

    @property
    def activation_sizes(self) -> ActivationSizes:
        """The neighbours of tokens, and the result, which is kept while the first layer is computed."""
        columns = self.columns + 2 * self.size
        return ActivationSizes(columns, columns, self.columns)


class TokenConvolution(Generic[A]):
    """See `TokenConvolutionSpec`. weight [size, columns], bias [size]."""

    def __init__(self, spec: TokenConvolutionSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops, self._dtype = spec, factory.ops, factory.dtype
        self._weight = factory.matrix(spec.name, spec.size, spec.columns)
        factory.load_convolution(spec.name, spec.size, spec.width)
        self._bias = factory.bias((spec.name,), (spec.size,), self._weight.bias_dtype)

    def __call__(self, x: A, batch: Batch) -> A:
        """`x` [num_tokens, size] -> the same shape."""
        rows = self._ops.neighbours(x, batch, self._spec.width, self._spec.columns)
        return self._ops.activate(self._weight.linear(rows, self._bias, self._dtype), self._spec.activation)
