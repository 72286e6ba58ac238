"""The frames between a process that decodes images or sounds and its parent.

question: length of the header, header (JSON), the file
answer:   kind; with DECODED: length of the header, header (JSON), what was decoded; with REFUSED: the reason
"""

import base64
import json
import struct
from typing import Any

DECODED, REFUSED, NO_MEMORY = b"d", b"r", b"m"
"""First byte of a decoding process's answer."""
_LENGTH = struct.Struct("<I")
_SPACE = b" \t\r\n"


def pack(header: dict[str, Any], content: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(encoded)), encoded, content])


def unpack(frame: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The header and the content of a frame."""
    (length,) = _LENGTH.unpack(frame[: _LENGTH.size])
    end = _LENGTH.size + length
    header: dict[str, Any] = json.loads(bytes(frame[_LENGTH.size : end]))
    return header, frame[end:]


def from_base64(text: bytes) -> bytes:
    """
    Raises:
        ValueError: it has other characters, or is cut short.
    """
    return base64.b64decode(text.translate(None, _SPACE), validate=True)
