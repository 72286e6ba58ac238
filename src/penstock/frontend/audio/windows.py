"""Sounds in prompts: their log-mel features, in windows that an audio encoder takes. In worker processes only."""

import hashlib
import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.config.audio_input import FRAMES_PER_SECOND, HOP
from penstock.config.sound_input import SoundInput
from penstock.dataclass import dataclass
from penstock.frontend.audio.features import Samples, log_mel
from penstock.frontend.audio.sounds import SoundError

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


def windows_of(samples: Samples, about: SoundInput) -> Windows:
    """Cut the features of a sound.

    Raises:
        SoundError: it is longer than the model takes, too short for one token, or too loud for finite features.
    """
    count = -(-len(samples) // HOP)
    if about.max_frames is not None and count > about.max_frames:
        seconds = about.max_frames / FRAMES_PER_SECOND
        raise SoundError(f"the audio is longer than the {seconds:g} s that this model takes: send it in parts")
    parts = [part for part in _parts(samples, about) if about.num_tokens(part.shape[1])]
    if not parts:
        raise SoundError("the audio is shorter than a token of this model: send more of it")
    sizes, contents = [(part.shape[0], part.shape[1]) for part in parts], [part.tobytes() for part in parts]
    digests = [
        hashlib.sha256(_SIZE.pack(*size) + content).hexdigest() for size, content in zip(sizes, contents, strict=True)
    ]
    return Windows(sizes, digests, contents)


def _parts(samples: Samples, about: SoundInput) -> Iterator[NDArray[np.float32]]:
    """The features of each window."""
    step = about.window_frames
    if about.margin:
        for first in range(0, len(samples), step * HOP):
            window = samples[first : first + step * HOP]
            count = -(-len(window) // HOP) + about.margin
            features = _features(window, about)[:, :count]
            yield np.pad(features, ((0, 0), (0, count - features.shape[1])))  # with zeros, as convolutions do
        return
    if about.bare and len(samples) < HOP:
        return
    features = _features(samples, about)
    count = features.shape[1] if about.filled or about.bare else -(-len(samples) // HOP)
    for first in range(0, count, step):
        yield features[:, first : min(first + step, count)]


def _features(samples: Samples, about: SoundInput) -> NDArray[np.float32]:
    features = log_mel(samples, about.num_mels, about.padded(-(-len(samples) // HOP)))
    if not np.isfinite(features).all():
        raise SoundError(TOO_LARGE)
    return features
