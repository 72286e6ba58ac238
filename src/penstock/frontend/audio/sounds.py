"""Sound files as samples: mono, float32, `SAMPLE_RATE` a second.

WAV files of integers or floats are read here; other formats by soundfile, if it is installed.
"""

import io
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.config.audio_input import SAMPLE_RATE

Samples = NDArray[np.float32]
_BLOCK_SECONDS = 30
_RATES = range(1_000, 192_001)
_MOST_CHANNELS = 16
_ZEROS = 32
"""Zero crossings of the interpolation filter, on each side."""
_PASSED = 0.95
"""Share of the lower rate's band that the filter passes."""
_ELEMENTS = 2**22
"""Input samples that are gathered at a time."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


Reader = Callable[[memoryview], Samples]


class SoundError(ValueError):
    """A sound that is not read; the message says why, and what would be."""


@dataclass(frozen=True, slots=True)
class _Sound:
    """An opened file."""

    rate: int
    num_frames: int
    blocks: Iterator[Samples]
    """[any, channels]"""


def read_sound(data: bytes, max_seconds: float) -> Samples:
    """The samples of a sound file.

    Raises:
        SoundError: it is damaged, of an unknown format, or longer than `max_seconds`.
    """
    sound = _open_wav(data) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else _open_other(data)
    if sound.rate not in _RATES:
        raise SoundError(f"the audio has {sound.rate} samples a second; {_RATES[0]} to {_RATES[-1]} are read")
    if sound.num_frames > max_seconds * sound.rate:  # the header says so, before anything is decoded
        raise _too_long(max_seconds)
    samples = np.concatenate([*_resampled(_mono(sound, max_seconds), sound.rate), np.empty(0, np.float32)])
    if not len(samples):
        raise SoundError("the audio is empty")
    if not np.isfinite(samples).all():
        raise SoundError("the audio has samples that are not finite numbers")
    return samples


def _too_long(max_seconds: float) -> SoundError:
    return SoundError(f"the audio is longer than {max_seconds:g} s (max_audio_seconds): send it in parts")


def _mono(sound: _Sound, max_seconds: float) -> Iterator[Samples]:
    """The means of channels."""
    count = 0
    for block in sound.blocks:
        count += len(block)
        if count > max_seconds * sound.rate:
            raise _too_long(max_seconds)
        yield block.mean(1, dtype=np.float32)


def _open_wav(data: bytes) -> _Sound:
    """Open a WAV file (RIFF): chunks of a name, a length and content. Only `fmt ` and `data` are read."""
    at, form = 12, None
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        content = memoryview(data)[at + 8 : at + 8 + size]
        if name == b"fmt " and len(content) >= 16:
            form = content
        if name == b"data":
            if form is None:
                break
            # streams write a length of 0, or one beyond the file's end: all that follows is sound
            is_streamed = not size and not _is_chunk(data, at + 8)
            return _wav_sound(form, memoryview(data)[at + 8 :] if is_streamed else content)
        at += 8 + size + size % 2
    raise SoundError("the WAV file is damaged: it has no format or no data")


def _is_chunk(data: bytes, at: int) -> bool:
    """Whether a chunk seems to begin here: with 4 printable ASCII characters, and a length within the file."""
    if at + 8 > len(data):
        return False
    name, size = struct.unpack_from("<4sI", data, at)
    return all(0x20 <= byte < 0x7F for byte in name) and at + 8 + size <= len(data)


def _wav_sound(form: memoryview, content: memoryview) -> _Sound:
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        (kind,) = struct.unpack_from("<H", form, 24)
    read = _READERS.get((kind, bits))
    if read is None:
        known = "8, 16, 24 or 32 bit integers, or 32 or 64 bit floats"
        raise SoundError(f"the WAV file has samples of kind {kind} with {bits} bits; {known} are read")
    if not 1 <= channels <= _MOST_CHANNELS:
        raise SoundError(f"the WAV file has {channels} channels; 1 to {_MOST_CHANNELS} are read")
    width = channels * bits // 8
    count = len(content) // width

    def blocks() -> Iterator[Samples]:
        step = _BLOCK_SECONDS * max(rate, 1)
        for first in range(0, count, step):
            part = content[first * width : min(first + step, count) * width]
            yield read(part).reshape(-1, channels)

    return _Sound(rate, count, blocks())


def _integers(dtype: str, scale: float, offset: float = 0.0) -> Reader:
    def read(part: memoryview) -> Samples:
        samples: Samples = (np.frombuffer(part, dtype).astype(np.float32) - np.float32(offset)) / np.float32(scale)
        return samples

    return read


def _of_24_bits(part: memoryview) -> Samples:
    wide = np.zeros((len(part) // 3, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(part, np.uint8).reshape(-1, 3)
    samples: Samples = wide.view("<i4").ravel().astype(np.float32) / np.float32(2**31)
    return samples


def _floats(dtype: str) -> Reader:
    return lambda part: np.frombuffer(part, dtype).astype(np.float32)


_READERS: dict[tuple[int, int], Reader] = {
    (_PCM, 8): _integers("u1", 2.0**7, 2.0**7),
    (_PCM, 16): _integers("<i2", 2.0**15),
    (_PCM, 24): _of_24_bits,
    (_PCM, 32): _integers("<i4", 2.0**31),
    (_FLOAT, 32): _floats("<f4"),
    (_FLOAT, 64): _floats("<f8"),
}


def _open_other(data: bytes) -> _Sound:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: its library is missing
        raise SoundError(
            "the audio is no WAV file; for FLAC, MP3 and Ogg, soundfile is needed: pip install '.[audio]' in "
            "Penstock's source folder"
        ) from None
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.LibsndfileError, RuntimeError, TypeError):
        raise SoundError("the audio is of no format that is read: send WAV, FLAC, MP3 or Ogg") from None
    if file.channels > _MOST_CHANNELS:
        raise SoundError(f"the audio has {file.channels} channels; 1 to {_MOST_CHANNELS} are read")

    def blocks() -> Iterator[Samples]:
        try:
            while len(block := file.read(_BLOCK_SECONDS * file.samplerate, dtype="float32", always_2d=True)):
                yield block
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise SoundError(f"the audio is damaged: {error}") from None

    return _Sound(file.samplerate, max(file.frames, 0), blocks())


def resample(samples: Samples, rate: int) -> Samples:
    """The samples at `SAMPLE_RATE` a second, without frequencies that this rate does not hold."""
    return np.concatenate([*_resampled(iter([samples]), rate), np.empty(0, np.float32)])


def _resampled(blocks: Iterator[Samples], rate: int) -> Iterator[Samples]:
    """Resample block by block.

    By a windowed sinc, with a filter for each of the places between two input samples where an output may lie.
    """
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    shared = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // shared, rate // shared
    reach = _reach(up, down)
    kept, first, done, total = np.zeros(reach, np.float32), -reach, 0, 0  # `first`: the input's index of kept[0]
    for block in itertools.chain(blocks, [None]):
        kept = np.concatenate((kept, np.zeros(reach, np.float32) if block is None else block))
        total += 0 if block is None else len(block)
        # outputs whose inputs are all there; an output n lies at n * down / up
        ready = -(-total * up // down) if block is None else max(done, (total - reach) * up // down)
        if done == ready:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(kept, 2 * reach + 1)
        while done < ready:
            places = np.arange(done, min(done + _ELEMENTS // (2 * reach + 1), ready), dtype=np.int64) * down
            taps = windows[places // up - reach - first]
            yield np.einsum("ij,ij->i", taps, _filters(up, down)[places % up])
            done += len(places)
        unused = max(0, min(done * down // up - reach - first, len(kept)))
        kept, first = kept[unused:], first + unused


def _reach(up: int, down: int) -> int:
    """Input samples on each side of an output."""
    return math.ceil(_ZEROS * max(1.0, down / up))


@lru_cache(maxsize=4)
def _filters(up: int, down: int) -> Samples:
    """[up, 2 * reach + 1]: the weights of input samples for outputs at multiples of 1 / up after one."""
    reach, band = _reach(up, down), _PASSED * min(1.0, up / down)
    distances = np.arange(-reach, reach + 1) - np.arange(up)[:, None] / up
    window = np.cos(np.pi / 2 * np.clip(distances / (reach + 1), -1, 1)) ** 2
    weights = band * np.sinc(band * distances) * window
    filters: Samples = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return filters
