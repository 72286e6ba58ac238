"""Worker process that decodes sounds and computes their features.

Run as `python -m penstock.frontend.audio.worker` by `penstock.frontend.audio.reader`, within limits of its own, as the
worker of images.
"""

from typing import Any

import numpy as np

from penstock.config.sound_input import SoundInput
from penstock.frontend.audio.features import log_mel
from penstock.frontend.audio.limits import CPU_SECONDS, MEMORY_BYTES
from penstock.frontend.audio.sounds import LongestSound, SoundError, count_samples, read_sound
from penstock.frontend.audio.windows import TOO_LARGE, longest_sound, sizes_of, windows_of
from penstock.frontend.decoder_frames import DECODED, NO_MEMORY, REFUSED, from_base64, pack, unpack
from penstock.system.worker_channel import Channel, limit_memory


def answer(frame: bytes) -> bytes:
    """The answer frame for one sound."""
    try:
        header, content = unpack(memoryview(frame))
        if "sound_input" in header:
            return _of_prompt(header, bytes(content))
        samples = read_sound(bytes(content), LongestSound(header["max_seconds"]))
        features = log_mel(samples, header["num_mels"], header["num_frames"])
        if not np.isfinite(features).all():
            raise SoundError(TOO_LARGE)
        return DECODED + pack({"num_samples": len(samples), "frames": features.shape[1]}, features.tobytes())
    except SoundError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return NO_MEMORY


def _of_prompt(header: dict[str, Any], content: bytes) -> bytes:
    """The answer frame for a sound in a prompt, in the form of an image's."""
    try:
        content = from_base64(content) if header["is_base64"] else content
    except ValueError as error:
        raise SoundError(f"the sound is not valid base64 ({error})") from None
    about = SoundInput(**header["sound_input"])
    longest = longest_sound(header["max_seconds"], about)
    made = {"rows": 0, "columns": 0}
    if not header["wants_pixels"]:
        return DECODED + pack({**made, "sizes": sizes_of(count_samples(content, longest), about)}, b"")
    windows = windows_of(read_sound(content, longest), about)
    return DECODED + pack({**made, "sizes": windows.sizes, "digests": windows.digests}, b"".join(windows.features))


def main() -> None:
    """Decode sounds until the parent ends or memory runs out."""
    limit_memory(MEMORY_BYTES)
    Channel().serve(answer, CPU_SECONDS, last=NO_MEMORY)


if __name__ == "__main__":
    main()
