"""Worker process that decodes, resizes and cuts images.

Run as `python -m penstock.frontend.images.worker` by `penstock.frontend.images.reader`. Decoders are C code that reads
strangers' bytes: a crash ends this process alone, and kernel limits bound its CPU time and memory.
"""

import hashlib
import struct

from penstock.config.image_input import ImageInput
from penstock.frontend.decoder_frames import DECODED, NO_MEMORY, REFUSED, from_base64, pack, unpack
from penstock.frontend.images.limits import CPU_SECONDS, MEMORY_BYTES
from penstock.frontend.images.pictures import PictureError, cut, decode, open_picture
from penstock.frontend.images.sizes import layout_of
from penstock.system.worker_channel import Channel, limit_memory

_SIZE = struct.Struct("<II")


def answer(frame: bytes) -> bytes:
    """The answer frame for one image."""
    try:
        header, content = unpack(memoryview(frame))
        data = _from_base64(bytes(content)) if header["is_base64"] else bytes(content)
        image_input = ImageInput(**header["image_input"])
        opened = open_picture(data, header["max_pixels"])
        layout = layout_of(opened.height, opened.width, image_input, header["is_low"])
        about = {"rows": layout.rows, "columns": layout.columns, "sizes": layout.sizes}
        if not header["wants_pixels"]:
            return DECODED + pack(about, b"")
        pictures = [picture.tobytes() for picture in cut(decode(opened), layout, image_input.resample)]
        digests = [
            hashlib.sha256(_SIZE.pack(*size) + pixels).hexdigest()
            for size, pixels in zip(layout.sizes, pictures, strict=True)
        ]
        return DECODED + pack({**about, "digests": digests}, b"".join(pictures))
    except PictureError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return NO_MEMORY


def _from_base64(text: bytes) -> bytes:
    try:
        return from_base64(text)
    except ValueError as error:
        raise PictureError(f"the image is not valid base64 ({error})") from None


def main() -> None:
    """Decode images until the parent ends or memory runs out."""
    limit_memory(MEMORY_BYTES)
    Channel().serve(answer, CPU_SECONDS, last=NO_MEMORY)


if __name__ == "__main__":
    main()
