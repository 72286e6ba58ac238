"""MP4 and WebM files (M4A, recordings of phones and browsers) as samples, by PyAV, which brings FFmpeg's libraries.

Of those libraries a stranger's bytes reach the demuxer that is named here and the decoders of `_CODECS`. They open no
other file and no address.
"""

import io
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass

if TYPE_CHECKING:
    from av import AudioFrame
    from av.container import InputContainer

Samples = NDArray[np.float32]
BLOCK_SECONDS = 30
_MP4, _WEBM = "mp4", "webm"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide")
"""Types of the first part of an MP4 or QuickTime file."""
_EBML = b"\x1aE\xdf\xa3"
_CODECS = (
    "aac",
    "alac",
    "flac",
    "mp3",
    "mp3float",
    "opus",
    "vorbis",
    "pcm_s16le",
    "pcm_s16be",
    "pcm_s24le",
    "pcm_f32le",
)


class SoundError(ValueError):
    """A sound that is not read; the message says why, and what would be."""


@dataclass(frozen=True, slots=True)
class OpenedSound:
    """An opened file."""

    rate: int
    num_frames: int
    """By its header, which may count a codec's delay; 0: unknown."""
    num_channels: int
    blocks: Iterator[Samples]
    """[any, channels]"""
    is_exact: bool = False
    """Whether `num_frames` is the number of frames of all blocks."""


def container_of(data: bytes) -> str | None:
    """The kind of container that a file is; None: neither MP4 nor WebM."""
    if data[4:8] in _BOXES:
        return _MP4
    return _WEBM if data.startswith(_EBML) else None


def open_container(data: bytes, kind: str) -> OpenedSound:
    """Open the first audio stream of a file of this kind.

    Raises:
        SoundError: it has none that is read, is damaged, or PyAV is missing.
    """
    try:
        import av
    except ImportError:
        raise SoundError(
            "the audio is an MP4 (M4A) or WebM file, for which PyAV is needed: pip install '.[audio]' in Penstock's "
            "source folder; or send it as WAV"
        ) from None
    only = {"codec_whitelist": ",".join(_CODECS), "protocol_whitelist": "none", "enable_drefs": "0"}
    try:
        file = av.open(io.BytesIO(data), "r", format=kind, container_options=only, metadata_errors="ignore")
    except MemoryError:  # FFmpeg's is an FFmpegError, too
        raise
    except (av.FFmpegError, ValueError) as error:
        raise _damaged(kind, error) from None
    if not file.streams.audio:
        raise SoundError(f"the {kind} file has no audio")
    context = file.streams.audio[0].codec_context
    codec = "unknown" if context is None else context.name
    if codec not in _CODECS:
        raise SoundError(
            f"the {kind} file has audio of the codec {codec[:40]}; AAC, Opus, Vorbis, MP3, FLAC and ALAC are read"
        )
    frames = _frames(file, kind)
    first = next(frames, None)
    if first is None:
        raise SoundError("the audio is empty")
    stream, seconds = file.streams.audio[0], Fraction(file.duration or 0, av.time_base)
    if stream.duration is not None and stream.time_base is not None:  # the file's is that of a longer video, too
        seconds = stream.duration * stream.time_base
    num_frames = int(seconds * first.sample_rate)
    return OpenedSound(first.sample_rate, max(num_frames, 0), first.layout.nb_channels, _blocks(first, frames))


def _damaged(kind: str, error: Exception) -> SoundError:
    return SoundError(f"the {kind} file is damaged: {getattr(error, 'strerror', None) or error}")


def _frames(file: "InputContainer", kind: str) -> "Iterator[AudioFrame]":
    import av

    try:
        yield from file.decode(file.streams.audio[0])
    except MemoryError:  # FFmpeg's is an FFmpegError, too
        raise
    except (av.FFmpegError, ValueError) as error:
        raise _damaged(kind, error) from None


def _blocks(first: "AudioFrame", frames: "Iterator[AudioFrame]") -> Iterator[Samples]:
    """Samples of about `BLOCK_SECONDS` at a time."""
    from av import AudioResampler

    rate, layout = first.sample_rate, first.layout
    to_floats = AudioResampler(format="fltp", layout=layout, rate=rate)
    parts: list[Samples] = []
    size, frame = 0, cast("AudioFrame | None", first)
    while frame is not None:
        if frame.sample_rate != rate or frame.layout.nb_channels != layout.nb_channels:
            raise SoundError("the audio changes its sample rate or its channels in the middle: send it as WAV")
        parts += [np.asarray(made.to_ndarray(), np.float32) for made in to_floats.resample(frame)]
        size += frame.samples
        if size >= BLOCK_SECONDS * rate:
            yield np.concatenate(parts, axis=1).T
            parts, size = [], 0
        frame = next(frames, None)
    if parts:
        yield np.concatenate(parts, axis=1).T
