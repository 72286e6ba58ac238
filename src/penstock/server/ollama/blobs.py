"""Ollama's uploads: files of models, streamed to disk and compared with their checksum. For operators only."""

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from penstock.checkpoint.created import blob_path, delete_unused_blobs
from penstock.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from penstock.server.admin import check_operator
from penstock.server.call_context import ContextOf
from penstock.server.ollama.errors import ERRORS

router = APIRouter(prefix="/api/blobs", tags=["Ollama"])

MAX_BLOB_BYTES = 2**40
"""Maximum size of an upload."""
FREE_BYTES = 2**30
"""Free space that an upload leaves on its disk."""
MAX_UPLOADS = 4
"""Maximum uploads at a time."""
_WRITTEN_BYTES = 2**20
"""Bytes that are hashed and written at a time, in a thread."""
_DIGEST = re.compile(r"sha256:(?P<hex>[0-9a-f]{64})")
_Digest = Annotated[str, PathParameter(description="`sha256:` and 64 hexadecimal digits.")]
_EMPTY: dict[str, Any] = {"content": {}}


def find_blob(digest: str, param: str) -> Path:
    """The path of an uploaded file.

    Raises:
        InvalidRequestError: the digest has another form, or there is no such file.
    """
    blob = _path(digest, param)
    if not blob.is_file():
        raise InvalidRequestError(f"{param}: there is no file {digest}: upload it to /api/blobs/{digest} first", param)
    return blob


@router.get("/{digest}", response_class=Response, responses={200: {"description": "It is here.", **_EMPTY}, **ERRORS})
async def has_blob(digest: _Digest, request: Request, context: ContextOf) -> Response:
    """Tell whether a file was uploaded; never its content. Clients ask by `HEAD`."""
    check_operator(request, context)
    if not _path(digest, "digest").is_file():
        raise ModelNotFoundError(f"there is no file {digest} here", "digest")
    return Response()


@router.post(
    "/{digest}",
    status_code=201,
    response_class=Response,
    responses={201: {"description": "It is stored.", **_EMPTY}, **ERRORS},
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def upload(digest: _Digest, request: Request, context: ContextOf) -> Response:
    """Upload a file for `/api/create`. A file that no model uses is deleted after a day."""
    check_operator(request, context)
    blob, state = _path(digest, "digest"), request.app.state
    if not blob.is_file():
        if state.num_uploads >= MAX_UPLOADS:
            raise OverloadedError(f"{MAX_UPLOADS} files are being uploaded already: send it again later")
        state.num_uploads += 1
        try:
            await _store(request, blob, digest)
        finally:
            state.num_uploads -= 1
    return Response(status_code=201)


def _path(digest: str, param: str) -> Path:
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise InvalidRequestError(f"{param} must be sha256: and 64 hexadecimal digits, not {digest[:80]!r}", param)
    return blob_path(found["hex"])


async def _store(request: Request, blob: Path, digest: str) -> None:
    """Stream a body to the path of its digest.

    Raises:
        InvalidRequestError: its content has another digest.
        BodyTooLargeError: it exceeds the limit, or the disk has no room.
    """
    await asyncio.to_thread(delete_unused_blobs)
    blob.parent.mkdir(parents=True, exist_ok=True)
    _check_room(int(request.headers.get("content-length", "0")), blob.parent)
    hashed, size = hashlib.sha256(), 0
    # Beside its place, so that a file under its digest is complete: `os.replace` stays within one disk.
    handle, part = tempfile.mkstemp(prefix=f"{blob.name}.", dir=blob.parent)
    try:
        with os.fdopen(handle, "wb") as file:

            def write(piece: bytes) -> None:
                hashed.update(piece)
                file.write(piece)

            async for piece in _pieces(request):
                size += len(piece)
                if size > MAX_BLOB_BYTES:
                    raise BodyTooLargeError(f"the file is larger than {MAX_BLOB_BYTES} bytes")
                # Again for each piece: a chunked body has no length, and others write to the disk.
                _check_room(len(piece), blob.parent)
                await asyncio.to_thread(write, piece)
        if f"sha256:{hashed.hexdigest()}" != digest:
            raise InvalidRequestError(f"the content has the digest sha256:{hashed.hexdigest()}, not {digest}", "digest")
        os.replace(part, blob)
    except OSError as error:
        raise BodyTooLargeError(f"the file cannot be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body in pieces of about `_WRITTEN_BYTES`."""
    seconds = request.app.state.body_timeout
    arriving, piece = request.stream(), bytearray()
    while True:
        try:
            # A limit for each piece, not for the whole: gigabytes may take hours.
            piece += await asyncio.wait_for(anext(arriving), seconds)
        except StopAsyncIteration:
            break
        except asyncio.TimeoutError:
            raise BodyTimeoutError(f"nothing more of the body arrived within {seconds:g} s (body_timeout)") from None
        except ClientDisconnect:
            raise ClientGoneError("the client disconnected during the upload") from None
        if len(piece) >= _WRITTEN_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _check_room(size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free - size < FREE_BYTES:
        raise BodyTooLargeError(
            f"the disk of {folder} has {free} bytes free, of which {FREE_BYTES} stay free: delete models, or give "
            "another disk by XDG_DATA_HOME"
        )
