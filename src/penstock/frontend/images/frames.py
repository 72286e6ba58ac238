"""The frames between `reader` and the process that decodes, and that process's limits.

question: length of the header, header (JSON), the image as bytes or base64
answer:   kind; with DECODED: length of the header, header (JSON), pixels of each picture
"""

import json
import struct
from typing import Any

CPU_SECONDS = 20.0
"""Maximum CPU seconds for one image."""
MEMORY_BYTES = 2 * 2**30
"""Maximum address space of a decoding process. 50 million pixels take 200 MB as RGB; alpha and
turning take a copy each."""
DECODED, REFUSED, NO_MEMORY = b"d", b"r", b"m"
"""First byte of a decoding process's answer."""
_LENGTH = struct.Struct("<I")


def pack(header: dict[str, Any], content: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(encoded)), encoded, content])


def unpack(frame: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The header and the content of a frame."""
    (length,) = _LENGTH.unpack(frame[: _LENGTH.size])
    end = _LENGTH.size + length
    header: dict[str, Any] = json.loads(bytes(frame[_LENGTH.size : end]))
    return header, frame[end:]
