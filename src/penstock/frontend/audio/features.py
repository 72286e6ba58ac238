"""Log-mel features as Whisper's models take them, in numpy; equal to those of `transformers` within 5e-5."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.config.audio_input import HOP, SAMPLE_RATE

Samples = NDArray[np.float32]
_FFT = 400
"""Samples of a frame."""
_FRAMES_AT_ONCE = 4096
_FLOOR = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest element, to which quieter ones are raised."""
_BREAK_HERTZ, _BREAK_MEL, _LINEAR = 1000.0, 15.0, 200.0 / 3.0
_LOG_STEP = math.log(6.4) / 27.0


def log_mel(samples: Samples, num_mels: int, num_frames: int) -> NDArray[np.float32]:
    """Features [num_mels, frames] of a sound at `SAMPLE_RATE`, HOP samples a frame; at least `num_frames` of them.

    A shorter sound is followed by silence. Features of samples beyond about 1e18 are not finite numbers.
    """
    missing = num_frames * HOP - len(samples)
    if missing > 0:
        samples = np.concatenate((samples, np.zeros(missing, np.float32)))
    count, filters = len(samples) // HOP, _filters(num_mels)
    edges = np.pad(samples, _FFT // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(edges, _FFT)[::HOP]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)).astype(np.float32)
    features = np.empty((num_mels, count), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # callers refuse infinite features
        for first in range(0, count, _FRAMES_AT_ONCE):
            last = min(first + _FRAMES_AT_ONCE, count)
            spectrum = np.fft.rfft(frames[first:last] * window, axis=1)
            power = spectrum.real**2 + spectrum.imag**2
            features[:, first:last] = np.log10(np.maximum(filters @ power.T, _FLOOR))
        np.maximum(features, features.max() - np.float32(_RANGE), out=features)
    features += np.float32(4.0)
    features /= np.float32(4.0)
    return features


@lru_cache(maxsize=2)
def _filters(num_mels: int) -> NDArray[np.float64]:
    """[num_mels, frequencies]: overlapping triangles, equally wide in mels, each of area one (Slaney's scale)."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), num_mels + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, _FFT // 2 + 1)
    slopes = edges[:, None] - frequencies
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    areas: NDArray[np.float64] = 2.0 / (edges[2:] - edges[:-2])
    return np.maximum(0.0, np.minimum(rising, falling)) * areas[:, None]


def _mel(hertz: float) -> float:
    """Above `_BREAK_HERTZ`."""
    return _BREAK_MEL + math.log(hertz / _BREAK_HERTZ) / _LOG_STEP


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels < _BREAK_MEL, mels * _LINEAR, _BREAK_HERTZ * np.exp(_LOG_STEP * (mels - _BREAK_MEL)))
