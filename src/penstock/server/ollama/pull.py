"""Ollama's `/api/pull`: downloads a model unless it is on this machine, and adds it to the running server."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.checkpoint.added import Added
from penstock.checkpoint.local import as_hub_id, find_whole
from penstock.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PenstockError,
)
from penstock.server.admin import check_operator
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.disconnect import cancelled_on_disconnect
from penstock.server.errors import reply_to_error
from penstock.server.listed import ListedOf, find_listed
from penstock.server.model_changes import added_of, check_untaken
from penstock.server.ollama.errors import shape
from penstock.server.ollama.library import PROGRESS, given_name, progress
from penstock.server.ollama.names import check_new_name
from penstock.server.ollama.schema import PullBody
from penstock.server.streams import Frame, json_line
from penstock.system.parent import name_parent

if TYPE_CHECKING:
    from penstock.server.models import Models

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)
logger = logging.getLogger("penstock.server")

MAX_PULLS = 2
"""Maximum downloads at a time."""
_LONGEST_LINE = 2**20
_KILLED_SECONDS = 5.0


@router.post("/pull", response_class=Response, responses=PROGRESS)
async def pull(body: PullBody, request: Request, context: ContextOf, listed: ListedOf) -> Response:
    """Serve one more model: a created one, an alias, or ORG/REPO of the hub, or ORG/REPO:Q4_K_M for a GGUF file. It is
    downloaded if it is not on this machine, and loaded when it is used. For operators, and for servers of several
    models; for what is served already it succeeds at once.
    """
    name, models = given_name(body), request.app.state.models
    if context.caller.may_use(name) and find_listed(listed, name) is not None:
        return progress(body.stream, "pulling manifest", "verifying sha256 digest", "success")
    if models is None:
        raise ModelNotFoundError(
            f"this server serves one model alone: to serve {name!r}, start another with penstock serve --model, or "
            "this one with --keep-alive or --models-dir, so that models may be added",
            "model",
        )
    check_operator(request, context)
    pulling = _pull(request, models, check_new_name(name, "model"))
    if body.stream:
        return _PullStream(pulling)
    with cancelled_on_disconnect(context.receive):
        async with aclosing(pulling):
            async for _ in pulling:
                pass
    return Response(msgspec.json.encode({"status": "success"}), media_type="application/json")


class _PullStream(StreamingResponse):
    """The steps of a pull as lines of JSON. The pull ends with the response, even while a line waits to be read."""

    def __init__(self, pulling: AsyncGenerator[Mapping[str, Any], None]) -> None:
        super().__init__(_lines(pulling), media_type=Frame.JSON_LINES.value)
        self._pulling = pulling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pulling):
            await super().__call__(scope, receive, send)


async def _lines(pulling: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    """The steps of a pull as lines of JSON; an error is the last."""
    try:
        async for step in pulling:
            yield json_line(step)
    except Exception as error:
        if not isinstance(error, PenstockError):
            logger.exception("a pull failed")
        yield json_line(shape(reply_to_error(error))[1])


async def _pull(request: Request, models: "Models", name: str) -> AsyncGenerator[Mapping[str, Any], None]:
    """
    Raises:
        InvalidRequestError: the model cannot be downloaded, or not be read, or its name was taken meanwhile.
        ModelNotFoundError: the name is none of the hub.
        OverloadedError: too many are being downloaded.
    """
    yield {"status": "pulling manifest"}
    try:
        path = await asyncio.to_thread(find_whole, name)
        if path is None:
            async with aclosing(_download(models, _hub_id(name))) as downloading:
                async for line in downloading:
                    if "path" in line:
                        path = str(line["path"])
                    else:
                        yield line
    except ConfigError as error:
        raise InvalidRequestError(f"{name} cannot be served: {error}", "model") from error
    assert path is not None, "a download ends with a path or an error"
    yield {"status": "writing manifest"}
    if (known := models.served.models.get(name)) is not None:  # another pull of it may have been faster
        if name not in known.names.all and known.names.add(name):  # it was deleted, and other names were not
            await added_of(request).record(partial(Added.with_name, name=name, model=name))
    else:
        check_untaken(request, name, "model")
        models.served.add_model(name, path)
        await added_of(request).record(partial(Added.with_model, name=name))
    yield {"status": "success"}


def _hub_id(name: str) -> str:
    """The hub id of a name.

    Raises:
        ModelNotFoundError: it is none.
    """
    given = as_hub_id(name)
    if given is None:
        raise ModelNotFoundError(
            f"{name!r} is neither on this machine nor a name of the Hugging Face hub, as ORG/REPO or, for one of its "
            "GGUF files, ORG/REPO:Q4_K_M",
            "model",
        )
    return given


async def _download(models: "Models", hub_id: str) -> AsyncGenerator[Mapping[str, Any], None]:
    """The lines of a process of `penstock.checkpoint.hub_pull`, which ends with this generator.

    Raises:
        InvalidRequestError: it failed.
        OverloadedError: too many run already.
    """
    if models.num_pulls >= MAX_PULLS:
        raise OverloadedError(f"{MAX_PULLS} models are being downloaded already: try again later")
    models.num_pulls += 1
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.checkpoint.hub_pull", hub_id),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **name_parent()},
            limit=_LONGEST_LINE,
        )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            step = json.loads(line)
            if "error" in step:
                raise InvalidRequestError(str(step["error"]), "model")
            if "digest" in step:
                step["status"] = f"pulling {step['digest'].removeprefix('sha256:')[:12]}"
            yield step
            if "path" in step:
                return
        raise EngineError("the download ended without a result; the server's log says more")
    finally:
        models.num_pulls -= 1
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait_for(process.wait(), _KILLED_SECONDS)
