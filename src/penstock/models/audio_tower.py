"""An audio tower: turns the log-mel features of a window into the keys and values that the text model attends to.

    log-mel -> convolutions -> layers, some at a time -> norm -> keys and values, for some of the text model's layers at
    a time

Both kinds of layers are counted as the tower's, in this order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.cross_attention import CrossKeys
from penstock.layers.encoder_head import wide
from penstock.layers.norm import Norm
from penstock.layers.spec import StepInputs
from penstock.models.decoder import DecoderLayer
from penstock.models.spec import AudioTowerSpec, ConvolutionSpec
from penstock.models.stream import Residual, Stream
from penstock.quantization.parameters import side_by_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.api.request import Image
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.linear.weight import Weight
    from penstock.kernels.memory import Store
    from penstock.quantization.base import WeightFactory

_WIDTH = 3
"""Frames that a convolution sees."""
_VECTOR = 64
"""Columns of a convolution's matrix are a multiple of this, which kernels read whole; the others are zeros."""


class AudioTower(Generic[A]):
    """An audio tower with the projections of the layers that attend to it. The loader fills the weights."""

    def __init__(self, spec: AudioTowerSpec, factory: WeightFactory[A]) -> None:
        self.spec, self._ops = spec, factory.ops
        self._convolutions = [Convolution(convolution, factory) for convolution in spec.convolutions]
        self._positions = factory.tensor(spec.positions, spec.num_positions, spec.hidden_size)
        self._layers = [DecoderLayer(layer, 1.0, factory) for layer in spec.layers]
        self._residual = Residual(1.0, factory.ops)
        self._last_norm = Norm(spec.last_norm, factory)
        self._keys = [CrossKeys(reader, factory.at(name)) for name, reader in spec.readers]

    @property
    def num_layers(self) -> int:
        return len(self._layers) + len(self._keys)

    def begin(self, window: Image) -> A:
        """The stream before the first layer, [positions, hidden_size]."""
        frames = np.frombuffer(window.pixels, np.float32).reshape(window.height, window.width).T
        x = self._convolutions[0](frames)
        for convolution in self._convolutions[1:]:
            x = convolution(self._ops.on_host(wide(x, self._ops)))
        return self._ops.add_rows(self._positions, x, 1.0)

    def run(
        self, x: A, first: int, last: int, batch: Batch, cache: AnyCache[A], keys: Sequence[AnyCache[A]], slot: Batch
    ) -> A:
        """The stream after layers `first` to `last`, in place of that before them.

        Args:
            batch, cache: the window as one sequence, for one layer's keys and values, which the next overwrites.
            keys, slot: the caches of the text model's layers, and the window's place there.
        """
        own = len(self._layers)
        for layer in self._layers[first:last]:
            mixed, residual = layer.mix_tokens(Stream(x), StepInputs(x, {}, {}), batch, cache)
            x = self._residual.added(layer.feed_forward(mixed, residual))
        if first < own <= last:
            x = self._last_norm(x)
        for index in range(max(first - own, 0), last - own):
            self._keys[index].store(x, slot, keys[index])
        return x


@dataclass(slots=True)
class _MatrixRows(Generic[A]):
    """A convolution's weights as rows of a matrix: frame by frame, then zeros."""

    store: Store[A]
    target: Weight[A]
    shape: tuple[int, ...]

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self.store(self.target, first, side_by_side(rows, padded_columns(self.shape[1] * _WIDTH)))


def padded_columns(size: int) -> int:
    """The number of columns of a convolution's matrix that uses `size` of them."""
    return -(-size // _VECTOR) * _VECTOR


class Convolution(Generic[A]):
    """A convolution as a linear map of neighbouring frames. See `ConvolutionSpec`."""

    def __init__(self, spec: ConvolutionSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops, self._dtype, self._constant = spec, factory.ops, factory.dtype, factory.constant
        self._columns = padded_columns(_WIDTH * spec.in_size)
        self._weight = factory.weight_of(spec.name, spec.out_size, self._columns)
        rows = _MatrixRows(factory.ops.store, self._weight, (spec.out_size, spec.in_size, _WIDTH))
        factory.add_parameter(spec.name, rows)
        self._bias = factory.bias((spec.name,), (spec.out_size,), self._weight.bias_dtype)

    def __call__(self, frames: NDArray[np.float32]) -> A:
        """`frames` [frames, in_size] -> [frames / stride, out_size], rounded up"""
        size, stride = self._spec.in_size, self._spec.stride
        padded = np.zeros((len(frames) + 2, size), np.float32)
        padded[1:-1] = frames
        count = -(-len(frames) // stride)
        rows = np.zeros((count, self._columns), np.float32)
        for place in range(_WIDTH):
            rows[:, place * size : (place + 1) * size] = padded[place : place + count * stride : stride]
        x = self._weight.linear(self._constant(rows, self._dtype), self._bias, self._dtype)
        return self._ops.activate(x, "gelu")
