"""Reads sounds in worker processes."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.config.audio_input import HOP, SAMPLE_RATE, AudioInput
from penstock.config.engine_config import AudioConfig
from penstock.errors import InvalidRequestError
from penstock.frontend.audio.features import log_mel
from penstock.frontend.audio.limits import CPU_SECONDS
from penstock.frontend.audio.transcription import Sound
from penstock.frontend.audio.windows import TOO_LARGE
from penstock.frontend.decoder_frames import DECODED, NO_MEMORY, pack, unpack
from penstock.frontend.decoders import NUM_WORKERS, DecoderKind, Decoders
from penstock.frontend.large_work import LargeWork

_MAX_WAITING_BYTES = 128 * 2**20
_DECODER = DecoderKind("penstock.frontend.audio.worker", "sound", CPU_SECONDS)


class SoundReader:
    """Reads sounds for one model. Its methods block, and may be called from any thread."""

    def __init__(self, about: AudioInput, limits: AudioConfig) -> None:
        self.about, self._limits = about, limits
        self._decoders = Decoders(_DECODER)

    def read(self, audio: str | os.PathLike[str] | bytes | NDArray[np.float32], field: str = "audio") -> Sound:
        """The features of a file, given by its path or content, or of samples, `SAMPLE_RATE` a second.

        Raises:
            InvalidRequestError: it is too large or too long, damaged, or of a format that is not read.
            EngineError: there is no process to read it.
        """
        if isinstance(audio, np.ndarray):
            return self._of_samples(audio, field)
        content = audio if isinstance(audio, bytes) else _content(Path(audio), field)
        most = self._limits.max_audio_bytes
        if len(content) > most:
            raise InvalidRequestError(f"{field}: the file has more than {most} bytes (max_audio_bytes)", field)
        about = self.about
        header = {
            "max_seconds": self._limits.max_audio_seconds,
            "num_mels": about.num_mels,
            "num_frames": about.num_frames,
        }
        answer = self._decoders.ask(pack(header, content), field)
        view = memoryview(answer)
        if answer[:1] == NO_MEMORY:
            raise InvalidRequestError(f"{field}: decoding the audio takes too much memory: send it in parts", field)
        if answer[:1] != DECODED:
            raise InvalidRequestError(f"{field}: {bytes(view[1:]).decode(errors='replace')}", field)
        made, features = unpack(view[1:])
        frames = np.frombuffer(features, np.float32).reshape(about.num_mels, made["frames"])
        return Sound(frames, -(-made["num_samples"] // HOP))

    def _of_samples(self, samples: NDArray[np.float32], field: str) -> Sound:
        most = self._limits.max_audio_seconds * SAMPLE_RATE
        if not np.issubdtype(samples.dtype, np.floating):
            raise InvalidRequestError(f"{field}: samples must be floats from -1 to 1, not {samples.dtype}", field)
        with np.errstate(over="ignore"):  # infinite samples are refused below
            samples = samples.astype(np.float32)
        if samples.ndim != 1 or not 0 < len(samples) <= most or not np.isfinite(samples).all():
            raise InvalidRequestError(
                f"{field}: samples must be one axis of finite numbers, {SAMPLE_RATE} a second, at most {most}", field
            )
        features = log_mel(samples, self.about.num_mels, self.about.num_frames)
        if not np.isfinite(features).all():
            raise InvalidRequestError(f"{field}: {TOO_LARGE}", field)
        return Sound(features, -(-len(samples) // HOP))

    def close(self) -> None:
        """Kill the processes; nothing can be read afterwards."""
        self._decoders.close()


class QueuedSounds:
    """As `SoundReader`, for an event loop, which it does not block; tenants take turns."""

    def __init__(self, about: AudioInput, limits: AudioConfig) -> None:
        self.about = about
        self._reader = SoundReader(about, limits)
        self._work = LargeWork(_MAX_WAITING_BYTES, num_threads=NUM_WORKERS)

    async def read(self, content: bytes, field: str, tenant: str = "") -> Sound:
        """The features of a file. Raises as `SoundReader.read`."""
        return await self._work.run(len(content), lambda: self._reader.read(content, field), tenant)

    def close(self) -> None:
        """Kill the processes that decode."""
        self._reader.close()
        self._work.close()


def _content(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{field}: {path} cannot be read: {error.strerror}", field) from error
