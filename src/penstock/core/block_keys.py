"""Keys of a text's blocks in the prefix tree, in the file of blocks and between engines.

    key    tokens of the block, int32 | digest of its images, if any: of each one's SHA-256 and its place in the block

So equal paths have equal tokens and equal pixels. The place matters because an image's placeholder may also occur as
plain text beside it.
"""

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from penstock.api.request import Image

CONTENT_BYTES = 32
"""Bytes by which the key of a block with images is longer than its tokens."""
_PLACE = struct.Struct("<i").pack


def block_key(tokens: "array[int]", images: Sequence[Image], index: int, block_size: int) -> bytes:
    """Key of the text's block of this index, which is full."""
    start = index * block_size
    key = tokens[start : start + block_size].tobytes()
    return key + image_content(images, start, start + block_size) if images else key


def block_keys(tokens: "array[int]", images: Sequence[Image], block_size: int, count: int) -> Iterator[bytes]:
    """Yield the keys of the text's first `count` blocks, which are full."""
    data, width = tokens.tobytes(), block_size * tokens.itemsize
    starts, ends = range(0, count * width, width), range(width, (count + 1) * width, width)
    keys = map(data.__getitem__, map(slice, starts, ends))
    return _with_images(keys, images, block_size) if images else keys


def _with_images(keys: Iterator[bytes], images: Sequence[Image], block_size: int) -> Iterator[bytes]:
    for index, key in enumerate(keys):
        yield key + image_content(images, index * block_size, (index + 1) * block_size)


def image_content(images: Sequence[Image], start: int, end: int) -> bytes:
    """Digest of the images that have tokens from `start` to `end`, `CONTENT_BYTES` long; empty if none has."""
    first = bisect_right(images, start, key=lambda image: image.start + image.count)
    content = b""
    for image in images[first:]:
        if image.start >= end:
            break
        content += image.digest + _PLACE(image.start - start)
    return hashlib.blake2b(content, digest_size=CONTENT_BYTES).digest() if content else b""
