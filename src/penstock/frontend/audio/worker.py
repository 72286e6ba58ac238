"""Worker process that decodes sounds and computes their features.

Run as `python -m penstock.frontend.audio.worker` by `penstock.frontend.audio.reader`, within limits of its own, as the
worker of images.
"""

import numpy as np

from penstock.frontend.audio.features import log_mel
from penstock.frontend.audio.sounds import SoundError, read_sound
from penstock.frontend.decoder_frames import DECODED, NO_MEMORY, REFUSED, pack, unpack
from penstock.system.worker_channel import Channel, limit_memory

MEMORY_BYTES = 3 * 2**30
"""Maximum address space: an hour takes 230 MB as samples, 120 MB as features of 80 mels, and both several times."""
CPU_SECONDS = 120.0
"""Maximum CPU seconds for one sound."""
TOO_LARGE = "the audio has samples that are too large: they must be from -1 to 1"


def answer(frame: bytes) -> bytes:
    """The answer frame for one sound."""
    try:
        header, content = unpack(memoryview(frame))
        samples = read_sound(bytes(content), header["max_seconds"])
        features = log_mel(samples, header["num_mels"], header["num_frames"])
        if not np.isfinite(features).all():
            raise SoundError(TOO_LARGE)
        return DECODED + pack({"num_samples": len(samples), "frames": features.shape[1]}, features.tobytes())
    except SoundError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return NO_MEMORY


def main() -> None:
    """Decode sounds until the parent ends or memory runs out."""
    limit_memory(MEMORY_BYTES)
    Channel().serve(answer, CPU_SECONDS, last=NO_MEMORY)


if __name__ == "__main__":
    main()
