"""The journal's images: each one's pixels once, by digest, and the requests that have it.

A request's record has its images without pixels. An image is deleted with the last request that has it.
"""

import contextlib
import hashlib
import sqlite3
import struct
from collections.abc import Iterable
from dataclasses import replace

from penstock.api.request import Image, Request

_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'images'"
_SIZES = struct.Struct("<II")


def without_pixels(request: Request) -> Request:
    """The request as its record has it."""
    return replace(request, images=tuple(replace(image, pixels=b"") for image in request.images))


def write_images(database: sqlite3.Connection, requests: Iterable[tuple[str, tuple[Image, ...]]]) -> None:
    """Write the images of new requests, by their ids; within a transaction."""
    uses = [(request_id, image) for request_id, images in requests for image in images]
    database.executemany(
        "INSERT OR IGNORE INTO image_uses VALUES (?, ?)", [(request_id, image.digest) for request_id, image in uses]
    )
    for digest, pixels in {image.digest: image.pixels for _, image in uses}.items():
        if database.execute("SELECT 1 FROM images WHERE digest = ?", (digest,)).fetchone() is None:
            database.execute("INSERT INTO images VALUES (?, ?)", (digest, pixels))


def delete_unused_images(database: sqlite3.Connection) -> None:
    """Delete the images whose requests are gone; within a transaction."""
    database.execute("DELETE FROM image_uses WHERE request NOT IN (SELECT id FROM requests)")
    database.execute("DELETE FROM images WHERE digest NOT IN (SELECT digest FROM image_uses)")


def with_pixels(database: sqlite3.Connection, request: Request, known: dict[bytes, bytes]) -> Request:
    """The request with the pixels of its images.

    Args:
        known: pixels that were read before, by digest; those read now are added.

    Raises:
        ValueError: an image is missing or damaged.
    """
    for image in request.images:
        if image.digest not in known:
            row = database.execute("SELECT pixels FROM images WHERE digest = ?", (image.digest,)).fetchone()
            if row is None or not isinstance(row[0], bytes):
                raise ValueError("one of its images is lost")
            if hashlib.sha256(_SIZES.pack(image.height, image.width) + row[0]).digest() != image.digest:
                raise ValueError("one of its images is damaged")
            known[image.digest] = row[0]
    return replace(request, images=tuple(replace(image, pixels=known[image.digest]) for image in request.images))


def salvage_images(
    old: sqlite3.Connection, new: sqlite3.Connection, requests: Iterable[tuple[str, tuple[Image, ...]]]
) -> None:
    """Copy the readable images of requests, by their ids, from a damaged journal; within a transaction."""
    with contextlib.suppress(sqlite3.Error):
        if old.execute(_HAS_TABLE).fetchone() is None:
            return
    for request_id, images in requests:
        for image in images:
            new.execute("INSERT OR IGNORE INTO image_uses VALUES (?, ?)", (request_id, image.digest))
            if new.execute("SELECT 1 FROM images WHERE digest = ?", (image.digest,)).fetchone() is not None:
                continue
            with contextlib.suppress(sqlite3.Error):  # a malformed page: the request is lost when it is read
                row = old.execute("SELECT digest, pixels FROM images WHERE digest = ?", (image.digest,)).fetchone()
                if row is not None:
                    new.execute("INSERT INTO images VALUES (?, ?)", row)
