"""Sound files as samples: mono, float32, `SAMPLE_RATE` a second.

WAV files of integers or floats are read here; MP4 and WebM by `containers`; other formats by soundfile, if it is
installed.
"""

import io
import itertools
import math
import struct
from collections.abc import Callable, Iterator

import numpy as np

from penstock.config.audio_input import SAMPLE_RATE
from penstock.dataclass import dataclass
from penstock.frontend.audio.containers import BLOCK_SECONDS, OpenedSound, Samples, container_of, open_container
from penstock.frontend.audio.containers import SoundError as SoundError

_RATES = range(1_000, 192_001)
_MOST_CHANNELS = 16
_ZEROS = 32
"""Zero crossings of the interpolation filter, on each side."""
_PASSED = 0.95
"""Share of the lower rate's band that the filter passes."""
_GROUP = 64
"""Outputs of the interpolation that are computed from the same inputs."""
_MOST_SAMPLES = 2**31
"""Samples of a file in all channels: two hours at 149 kHz, such as three channels of 48 kHz."""
_UNKNOWN_FRAMES = 2**63 - 1
"""Frames, by soundfile, of a file whose header does not say how many it has."""
_DELAY = 0.5
"""Most seconds that a header may count beyond what is decoded, for a codec's delay and its last frame."""
_EMPTY = "the audio is empty"
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


Reader = Callable[[memoryview], Samples]


@dataclass(frozen=True, slots=True)
class LongestSound:
    """The longest sound that is read."""

    seconds: float
    is_models: bool = False
    """Whether the model sets it, and not the option."""

    @property
    def words(self) -> str:
        seconds = f"{self.seconds:g} s"
        return f"the {seconds} that this model takes" if self.is_models else f"{seconds} (max_audio_seconds)"


def read_sound(data: bytes, longest: LongestSound) -> Samples:
    """The samples of a sound file.

    Raises:
        SoundError: it is damaged, of an unknown format, or too long.
    """
    sound = _open(data, longest)
    samples = np.concatenate([*_resampled(_mono(sound, longest), sound.rate), np.empty(0, np.float32)])
    if not len(samples):
        raise SoundError(_EMPTY)
    if not np.isfinite(samples).all():
        raise SoundError("the audio has samples that are not finite numbers")
    return samples


def count_samples(data: bytes, longest: LongestSound) -> int:
    """The number of samples that `read_sound` returns; WAV files are not decoded. Raises as that does."""
    sound = _open(data, longest)
    count = sound.num_frames if sound.is_exact else sum(map(len, _mono(sound, longest)))
    if not count:
        raise SoundError(_EMPTY)
    return -(-count * SAMPLE_RATE // sound.rate)


def _open(data: bytes, longest: LongestSound) -> OpenedSound:
    sound = _open_wav(data) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else _open_other(data)
    if sound.rate not in _RATES:
        raise SoundError(f"the audio has {sound.rate} samples a second; {_RATES[0]} to {_RATES[-1]} are read")
    if not 1 <= sound.num_channels <= _MOST_CHANNELS:
        raise SoundError(f"the audio has {sound.num_channels} channels; 1 to {_MOST_CHANNELS} are read")
    spare = 0 if sound.is_exact else _DELAY * sound.rate
    _check_length(sound, sound.num_frames - spare, longest)  # by the header, before anything is decoded
    return sound


def _check_length(sound: OpenedSound, num_frames: float, longest: LongestSound) -> None:
    if num_frames > longest.seconds * sound.rate:
        raise SoundError(f"the audio is longer than {longest.words}: send it in parts")
    if num_frames * sound.num_channels > _MOST_SAMPLES:
        raise SoundError(f"the audio has more than {_MOST_SAMPLES} samples: send it in parts, or at a lower rate")


def _mono(sound: OpenedSound, longest: LongestSound) -> Iterator[Samples]:
    """The means of channels."""
    count = 0
    for block in sound.blocks:
        count += len(block)
        # Again as it is decoded: the header may say less than follows.
        _check_length(sound, count, longest)
        yield block.mean(1, dtype=np.float32)


def _open_wav(data: bytes) -> OpenedSound:
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
        # RIFF pads chunks to even lengths.
        at += 8 + size + size % 2
    raise SoundError("the WAV file is damaged: it has no format or no data")


def _is_chunk(data: bytes, at: int) -> bool:
    """Whether a chunk seems to begin here: with 4 printable ASCII characters, and a length within the file."""
    if at + 8 > len(data):
        return False
    name, size = struct.unpack_from("<4sI", data, at)
    return all(0x20 <= byte < 0x7F for byte in name) and at + 8 + size <= len(data)


def _wav_sound(form: memoryview, content: memoryview) -> OpenedSound:
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        (kind,) = struct.unpack_from("<H", form, 24)
    read = _READERS.get((kind, bits))
    if read is None:
        known = "8, 16, 24 or 32 bit integers, or 32 or 64 bit floats"
        raise SoundError(f"the WAV file has samples of kind {kind} with {bits} bits; {known} are read")
    width = channels * bits // 8
    count = len(content) // max(width, 1)

    def blocks() -> Iterator[Samples]:
        step = BLOCK_SECONDS * max(rate, 1)
        for first in range(0, count, step):
            part = content[first * width : min(first + step, count) * width]
            yield read(part).reshape(-1, channels)

    return OpenedSound(rate, count, channels, blocks(), is_exact=True)


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


def _open_other(data: bytes) -> OpenedSound:
    container = container_of(data)
    if container is not None:
        return open_container(data, container)
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
        raise SoundError(
            "the audio is of no format that is read: send WAV, FLAC, MP3, Ogg, MP4 (M4A) or WebM"
        ) from None

    num_frames = max(file.frames, 0)
    if num_frames == _UNKNOWN_FRAMES:  # a FLAC file that was written as a stream
        num_frames, file.seekable = 0, lambda: False  # soundfile seeks after each reading, which then fails

    def blocks() -> Iterator[Samples]:
        try:
            while len(block := file.read(BLOCK_SECONDS * file.samplerate, dtype="float32", always_2d=True)):
                yield block
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise SoundError(f"the audio is damaged: {error}") from None

    return OpenedSound(file.samplerate, num_frames, file.channels, blocks())


def resample(samples: Samples, rate: int) -> Samples:
    """The samples at `SAMPLE_RATE` a second, without frequencies that this rate does not hold."""
    return np.concatenate([*_resampled(iter([samples]), rate), np.empty(0, np.float32)])


def _resampled(blocks: Iterator[Samples], rate: int) -> Iterator[Samples]:
    """Resample block by block, by a windowed sinc.

    Outputs lie at the same places between inputs again after a cycle, of a second at most. Each group of a cycle's
    outputs is a matrix product for all cycles of a block.
    """
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    shared = math.gcd(rate, SAMPLE_RATE)
    repeats = -(-_GROUP * shared // SAMPLE_RATE)
    up, down = repeats * SAMPLE_RATE // shared, repeats * rate // shared
    reach, groups = _groups(up, down)
    kept, read, made = np.zeros(reach, np.float32), 0, 0  # kept[reach] is the first input of the next cycle
    for block in itertools.chain(blocks, [None]):
        read += 0 if block is None else len(block)
        total = -(-read * up // down)
        if block is None:  # silence completes the last cycle
            needed = -(-(total - made) // up) * down + 2 * reach
            block = np.zeros(max(0, needed - len(kept)), np.float32)
        kept = np.concatenate((kept, block))
        count = max(0, (len(kept) - 2 * reach) // down)
        outputs = np.empty((count, up), np.float32)
        if count:
            cycles = np.lib.stride_tricks.sliding_window_view(kept, down + 2 * reach)[::down][:count]
            for place, begin, weights in groups:
                inputs = np.ascontiguousarray(cycles[:, begin : begin + len(weights)])
                outputs[:, place : place + weights.shape[1]] = inputs @ weights
        kept = kept[count * down :]
        yield outputs.ravel()[: total - made]
        made += count * up


_Group = tuple[int, int, Samples]
"""First output of a cycle, first input, and weights [inputs, outputs]."""


def _groups(up: int, down: int) -> tuple[int, list[_Group]]:
    """Inputs before and after a cycle of `down` inputs that its `up` outputs need, and the outputs in groups."""
    reach, band = math.ceil(_ZEROS * max(1.0, down / up)), _PASSED * min(1.0, up / down)
    groups: list[_Group] = []
    for first in range(0, up, _GROUP):
        last = min(first + _GROUP, up)
        begin, end = first * down // up, (last - 1) * down // up + 2 * reach + 1
        places = np.arange(first, last) * down / up
        distances = (np.arange(begin - reach, end - reach)[:, None] - places).astype(np.float32)
        window = np.cos(np.pi / 2 * np.clip(distances / (reach + 1), -1, 1)) ** 2
        weights = band * np.sinc(band * distances) * window
        groups.append((first, begin, weights / weights.sum(0)))
    return reach, groups
