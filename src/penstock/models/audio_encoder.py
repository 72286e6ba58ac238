"""An audio encoder: turns the log-mel frames of a sound into features, the vectors in place of its tokens' embeddings.

    log-mel -> convolutions + positions -> layers, some at a time -> connector -> features

To its runner a sound is a picture of one row of patches, and an encoder a `Tower`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Generic

import numpy as np

from penstock.kernels.array_types import A
from penstock.layers.encoder_head import wide
from penstock.layers.portable_math import cosines_and_sines, power
from penstock.layers.spec import StepInputs
from penstock.models.audio_tower import Convolution
from penstock.models.decoder import DecoderLayer
from penstock.models.patches import PatchGrid
from penstock.models.spec import AudioEncoderSpec
from penstock.models.spectrogram import Spectrogram
from penstock.models.stream import Residual, Stream
from penstock.models.tower_parts import Connector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.api.request import Image
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory

_LONGEST_WAVE = 10000.0
"""Of sinusoids, in positions and radians."""


class AudioEncoder(Generic[A]):
    """An audio encoder with its connector. The loader fills the weights. See `Tower` for the methods."""

    taps: tuple[int, ...] = ()
    num_angles = 0

    def __init__(self, spec: AudioEncoderSpec, factory: WeightFactory[A]) -> None:
        self.spec, self._ops, self._dtype = spec, factory.ops, factory.dtype
        self._constant = factory.constant
        self._convolutions = [Convolution(convolution, factory) for convolution in spec.convolutions]
        self._spectrogram = None if spec.spectrogram is None else Spectrogram(spec, spec.spectrogram, factory)
        self._places: A | None = None
        if spec.positions is not None:
            self._places = factory.tensor(spec.positions, spec.num_places, spec.hidden_size)
        self._layers = [DecoderLayer(layer, 1.0, factory) for layer in spec.layers]
        self._residual = Residual(1.0, factory.ops)
        self._connector = Connector(spec.connector, spec.group, spec.hidden_size, factory)

    def grid(self, sound: Image) -> PatchGrid:
        """The positions of a sound, whose columns are the places of their vectors."""
        count = self.spec.positions_of(sound.width)
        window = self.spec.window or count
        lengths = tuple(min(window, count - first) for first in range(0, count, window))
        places = np.arange(count)
        return PatchGrid(1, count, np.zeros_like(places), places % self.spec.num_places, lengths, None)

    def most_windows(self, num_patches: int) -> int:
        return 0 if self.spec.window is None else -(-num_patches // self.spec.window)

    def begin(self, sound: Image, grid: PatchGrid) -> A:
        """The stream before the first layer, [positions, hidden_size]."""
        frames = np.frombuffer(sound.pixels, np.float32).reshape(sound.height, sound.width).T
        step = self._frames_at_once or len(frames)
        parts = [self._convolved(frames[first : first + step]) for first in range(0, len(frames), step)]
        x = self._constant(np.concatenate(parts)[: grid.width], self._dtype)
        if self._places is None:  # here: a build that only records sizes needs no sinusoids
            self._places = self._constant(_sinusoids(self.spec.num_places, self.spec.hidden_size), self._dtype)
        places = self._ops.gather(self._places, self._constant(grid.columns))
        return self._ops.add_rows(places, x, 1.0)

    @property
    def _frames_at_once(self) -> int | None:
        """Frames that the convolutions see; None: all."""
        if self.spec.spectrogram is not None:
            return self.spec.spectrogram.chunk
        return None if self.spec.window is None else self.spec.window * self.spec.stride

    def _convolved(self, frames: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._spectrogram is not None:
            return self._spectrogram(frames)
        for convolution in self._convolutions:
            frames = self._ops.on_host(wide(convolution(frames), self._ops))
        return frames

    def angles(self, grid: PatchGrid) -> None:
        """There is no rotary embedding."""

    def layer(self, index: int, x: A, angles: A | None, whole: Batch, windows: Batch, cache: AnyCache[A]) -> A:
        layer, batch = self._layers[index], whole if self.spec.window is None else windows
        mixed, residual = layer.mix_tokens(Stream(x), StepInputs(x, {}, {}), batch, cache)
        return self._residual.added(layer.feed_forward(mixed, residual))

    def tap(self, index: int, x: A, grid: PatchGrid) -> None:
        """No layer has one."""

    def end(self, x: A, grid: PatchGrid) -> A:
        """The features [groups, size] of the last layer's output."""
        return self._connector(x[: grid.width - grid.width % self.spec.group])


def _sinusoids(count: int, size: int) -> NDArray[np.float32]:
    """[count, size]: sines, then cosines, of waves from 2 pi to 2 pi `_LONGEST_WAVE` positions."""
    half = size // 2
    rates = np.array([power(_LONGEST_WAVE, Fraction(-index, half - 1)) for index in range(half)], np.float32)
    cosines, sines = cosines_and_sines(np.arange(count, dtype=np.float32)[:, None] * rates)
    return np.concatenate((sines, cosines), 1).astype(np.float32)
