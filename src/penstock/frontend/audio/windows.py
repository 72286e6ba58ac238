"""Sounds in prompts: their log-mel features, in windows that an audio encoder takes. In worker processes only."""

import hashlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.config.audio_input import FRAMES_PER_SECOND, HOP
from penstock.config.sound_input import SoundInput
from penstock.dataclass import dataclass
from penstock.frontend.audio.features import Samples, log_mel
from penstock.frontend.audio.sounds import LongestSound, SoundError

_SIZE = struct.Struct("<II")
TOO_LARGE = "the audio has samples that are too large: they must be from -1 to 1"


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a sound."""

    sizes: list[tuple[int, int]]
    """Mels and frames of each."""
    digests: list[str]
    """SHA-256 of each one's size and features, in hexadecimal."""
    features: list[bytes]
    """float32 [mels, frames]"""


def longest_sound(max_seconds: float, about: SoundInput) -> LongestSound:
    """The longest sound that the model takes, and that `max_audio_seconds` allows."""
    if about.max_frames is None or about.max_frames > max_seconds * FRAMES_PER_SECOND:
        return LongestSound(max_seconds)
    return LongestSound(about.max_frames / FRAMES_PER_SECOND, is_models=True)


def sizes_of(num_samples: int, about: SoundInput) -> list[tuple[int, int]]:
    """Mels and frames of each window of a sound of so many samples.

    Raises:
        SoundError: it is too short for one token.
    """
    step, frames = about.window_frames, -(-num_samples // HOP)
    if about.margin:
        lasting = [min(step * HOP, num_samples - first) for first in range(0, num_samples, step * HOP)]
        widths = [-(-count // HOP) + about.margin for count in lasting]
    else:
        total = about.padded(frames) if about.filled else num_samples // HOP if about.bare else frames
        widths = [min(step, total - first) for first in range(0, total, step)]
    sizes = [(about.num_mels, width) for width in widths if about.num_tokens(width)]
    if not sizes:
        raise SoundError("the audio is shorter than a token of this model: send more of it")
    return sizes


def windows_of(samples: Samples, about: SoundInput) -> Windows:
    """Cut the features of a sound.

    Raises:
        SoundError: it is too short for one token, or too loud for finite features.
    """
    sizes = sizes_of(len(samples), about)
    contents = [part.tobytes() for part in _parts(samples, [width for _, width in sizes], about)]
    digests = [
        hashlib.sha256(_SIZE.pack(*size) + content).hexdigest() for size, content in zip(sizes, contents, strict=True)
    ]
    return Windows(sizes, digests, contents)


def _parts(samples: Samples, widths: Sequence[int], about: SoundInput) -> Iterator[NDArray[np.float32]]:
    """The features of windows of these widths."""
    step = about.window_frames
    features = None if about.margin else _features(samples, about)
    for index, width in enumerate(widths):
        first = index * step
        if features is not None:
            yield features[:, first : first + width]
            continue
        apart = _features(samples[first * HOP : (first + step) * HOP], about)[:, :width]
        yield np.pad(apart, ((0, 0), (0, width - apart.shape[1])))  # with zeros, as convolutions do


def _features(samples: Samples, about: SoundInput) -> NDArray[np.float32]:
    features = log_mel(samples, about.num_mels, about.padded(-(-len(samples) // HOP)))
    if not np.isfinite(features).all():
        raise SoundError(TOO_LARGE)
    return features
