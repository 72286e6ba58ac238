"""Convolutions of an audio encoder over mels and frames together, as linear maps of neighbourhoods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataclass import dataclass
from penstock.layers.encoder_head import wide
from penstock.models.audio_tower import padded_columns
from penstock.models.spec import AudioEncoderSpec, SpectrogramSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.kernels.linear.weight import Weight
    from penstock.kernels.memory import Store
    from penstock.quantization.base import WeightFactory

_WIDTH, _STRIDE = 3, 2


class Spectrogram:
    """The convolutions of a chunk of frames, and the linear map after them. See `SpectrogramSpec`."""

    def __init__(self, encoder: AudioEncoderSpec, spec: SpectrogramSpec, factory: WeightFactory) -> None:
        self._spec, self._ops, self._dtype, self._constant = spec, factory.ops, factory.dtype, factory.constant
        sizes = (1, spec.channels, spec.channels)
        self._convolutions = [
            _Convolution(name, size, spec.channels, factory)
            for name, size in zip(spec.convolutions, sizes, strict=True)
        ]
        columns = spec.channels * spec.reduced(encoder.num_mels)
        self._output = factory.matrix(spec.output, encoder.hidden_size, columns)

    def __call__(self, frames: NDArray[np.float32]) -> NDArray[np.float32]:
        """`frames` [frames, mels] -> [positions, hidden_size]"""
        filled = np.zeros((self._spec.chunk, frames.shape[1]), np.float32)
        filled[: len(frames)] = frames
        x = filled[:, :, None]
        for convolution in self._convolutions:
            x = convolution(x)
        rows = np.ascontiguousarray(x.swapaxes(1, 2)).reshape(len(x), -1)[: self._spec.reduced(len(frames))]
        made = self._output.linear(self._constant(rows, self._dtype), None, self._dtype)
        return self._ops.on_host(wide(made, self._ops))


@dataclass(slots=True)
class _MatrixRows:
    """A convolution's weights as rows of a matrix: neighbour by neighbour, then zeros."""

    store: Store
    target: Weight
    shape: tuple[int, ...]

    def load(self, first: int, rows: NDArray[Any]) -> None:
        count, size = len(rows), self.shape[1] * _WIDTH**2
        made = np.zeros((count, padded_columns(size)), rows.dtype)
        made[:, :size] = rows.transpose(0, 3, 2, 1).reshape(count, size)  # [out, in, mels, frames]
        self.store(self.target, first, made)


class _Convolution:
    """A convolution over frames and mels."""

    def __init__(self, name: str, in_size: int, out_size: int, factory: WeightFactory) -> None:
        self._out_size = out_size
        self._ops, self._dtype, self._constant = factory.ops, factory.dtype, factory.constant
        self._columns = padded_columns(_WIDTH**2 * in_size)
        self._weight = factory.weight_of(name, out_size, self._columns)
        rows = _MatrixRows(factory.ops.store, self._weight, (out_size, in_size, _WIDTH, _WIDTH))
        factory.add_parameter(name, rows)
        self._bias = factory.bias((name,), (out_size,), self._weight.bias_dtype)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """`x` [frames, mels, in_size] -> [frames / 2, mels / 2, out_size], rounded up"""
        frames, mels, size = x.shape
        edged = np.pad(x, ((1, 2), (1, 2), (0, 0)))
        shape = (-(-frames // _STRIDE), -(-mels // _STRIDE))
        rows = np.zeros((*shape, self._columns), np.float32)
        for place in range(_WIDTH**2):
            frame, mel = divmod(place, _WIDTH)
            seen = edged[frame : frame + 2 * shape[0] : _STRIDE, mel : mel + 2 * shape[1] : _STRIDE]
            rows[:, :, place * size : (place + 1) * size] = seen
        flat = self._constant(rows.reshape(-1, self._columns), self._dtype)
        made = self._ops.activate(self._weight.linear(flat, self._bias, self._dtype), "gelu")
        return self._ops.on_host(wide(made, self._ops)).reshape(*shape, self._out_size)
