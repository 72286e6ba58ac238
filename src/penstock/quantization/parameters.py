"""Parameters that fill one tensor, or one matrix, from the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from penstock.config.weight_formats import WeightFormat
from penstock.kernels.array_types import A
from penstock.kernels.linear.quantized import Quantized, dequantize
from penstock.quantization.rows import Fillable, Parameter

if TYPE_CHECKING:
    from penstock.kernels.memory import Store


class TensorParameter(Generic[A]):
    """A tensor that is converted to the target's dtype, optionally scaled by `factor` and shifted by `offset`."""

    def __init__(self, store: Store[A], target: A, offset: float = 0.0, factor: float = 1.0) -> None:
        self.shape: tuple[int, ...] = tuple(target.shape)
        self._store, self._target, self._offset, self._factor = store, target, offset, factor

    def load(self, first: int, rows: NDArray[Any]) -> None:
        if self._offset or self._factor != 1.0:
            rows = rows.astype(np.float32) * np.float32(self._factor) + np.float32(self._offset)
        self._store(self._target, first, rows)


class TapsParameter(Generic[A]):
    """The weights of a depthwise convolution: [channels, 1, kernel] in the checkpoint, [kernel, channels] here."""

    def __init__(self, store: Store[A], target: A, factors: NDArray[np.float32] | None = None) -> None:
        """`target` [kernel, channels], `factors` [channels] on its values."""
        kernel, channels = target.shape
        self.shape: tuple[int, ...] = (channels, 1, kernel)
        self._store, self._target, self._factors = store, target, factors
        self._gathered: NDArray[np.float32] | None = None
        self._missing = channels

    def load(self, first: int, rows: NDArray[Any]) -> None:
        if self._gathered is None:
            self._gathered = np.empty(self.shape[2:] + self.shape[:1], np.float32)
        self._gathered[:, first : first + len(rows)] = rows[:, 0].T
        self._missing -= len(rows)
        if not self._missing:
            made = self._gathered if self._factors is None else self._gathered * self._factors
            self._store(self._target, 0, made)
            self._gathered = None


class TapsPart:
    """Weights of some channels of a convolution, which are a tensor of their own in the checkpoint."""

    def __init__(self, whole: TapsParameter, first: int, channels: int) -> None:
        self.shape: tuple[int, ...] = (channels, *whole.shape[1:])
        self._whole, self._first = whole, first

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._whole.load(self._first + first, rows)


class ReshapedParameter:
    """A tensor that the checkpoint stores with a first dimension of 1."""

    def __init__(self, parameter: Parameter, shape: tuple[int, ...]) -> None:
        self.shape, self._parameter = shape, parameter

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._parameter.load(0, rows.reshape(self._parameter.shape))


class ConvolutionRows:
    """The weights of a convolution over tokens, [out, in, width] in the checkpoint, as rows of a matrix."""

    def __init__(self, parameter: Parameter, in_size: int, width: int) -> None:
        rows, self._columns = parameter.shape
        self.shape: tuple[int, ...] = (rows, in_size, width)
        self._parameter = parameter

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._parameter.load(first, side_by_side(rows, self._columns))


def side_by_side(rows: NDArray[Any], columns: int) -> NDArray[Any]:
    """`rows` [out, in, width] -> [out, columns]: the weights place by place, then zeros."""
    size = rows.shape[1] * rows.shape[2]
    made = np.zeros((len(rows), columns), rows.dtype)
    made[:, :size] = rows.swapaxes(1, 2).reshape(len(rows), size)
    return made


class FirstRepeated:
    """A tensor whose last rows, which the checkpoint lacks, repeat its first row."""

    def __init__(self, parameter: Parameter, rows: int) -> None:
        """
        Args:
            rows: in the checkpoint.
        """
        self.shape: tuple[int, ...] = (rows, *parameter.shape[1:])
        self._parameter, self._lacking = parameter, range(rows, parameter.shape[0])

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._parameter.load(first, rows)
        if first == 0:
            for row in self._lacking:
                self._parameter.load(row, rows[:1])


class FloatRows:
    """Rows of a weight that is floating point both in the checkpoint and in the kernel."""

    def __init__(self, weight: Fillable, first: int, count: int) -> None:
        self.shape: tuple[int, ...] = (count, weight.columns)
        self.weight, self.first = weight, first

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self.weight.load(self.first + first, rows)


class GatheredMatrix:
    """A matrix, stored in any format, that is passed to a callback in floating point once all its rows are loaded."""

    def __init__(self, rows: int, columns: int, format: WeightFormat, take: Callable[[NDArray[Any]], None]) -> None:
        self.rows, self.columns, self.format = rows, columns, format
        self._missing, self._take = rows, take
        self._values: NDArray[Any] = np.empty((0, columns))

    def load(self, first: int, rows: NDArray[Any] | Quantized) -> None:
        made = dequantize(rows, self.format) if isinstance(rows, Quantized) else rows
        if self._missing == self.rows:  # allocate on the first rows only
            self._values = np.empty((self.rows, self.columns), made.dtype)
        self._values[first : first + len(made)] = made
        self._missing -= len(made)
        if not self._missing:
            self._take(self._values)
            self._values = np.empty((0, self.columns))
