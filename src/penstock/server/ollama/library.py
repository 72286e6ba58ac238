"""Ollama's routes about models: the served model, its names and its adapters, and created models."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.checkpoint.created import copy_created, find_created, recipe_of, remove_created
from penstock.checkpoint.summary import ModelSummary, summary_of
from penstock.errors import AdapterError, ConfigError, InvalidRequestError, ModelNotFoundError
from penstock.server.admin import check_operator
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import Call, CallOf, ServingOf
from penstock.server.ollama.created_models import listed_created, modelfile, shown_created, with_recipe
from penstock.server.ollama.errors import ERRORS
from penstock.server.ollama.infill import infill_marks
from penstock.server.ollama.model_facts import details, model_info, parameters_text
from penstock.server.ollama.names import check_new_name, choose_model, served_name, tagged
from penstock.server.ollama.schema import (
    CopyBody,
    ListedModel,
    ListedModels,
    LoadedModels,
    ModelDetails,
    NameBody,
    Progress,
    PullBody,
    ShowBody,
    ShownModel,
    Version,
)
from penstock.server.streams import JSON_LINES, Frame, json_line

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)

_NEVER = "2318-01-01T00:00:00Z"
"""When the model is unloaded: a time that every client can compute with."""
PROGRESS: dict[int | str, dict[str, Any]] = {200: {"model": Progress, "content": JSON_LINES}, **ERRORS}
_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "It is done.", "content": {}}, **ERRORS}


@router.get("/version", responses=ERRORS)
async def version() -> Version:
    """The server's version: Penstock's."""
    return {"version": __version__}


@router.get("/tags", responses=ERRORS)
async def list_models(call: CallOf) -> ListedModels:
    """The served model by each of its names, its adapters, and models that were created, which other servers serve."""
    summary, capabilities = await _summary(call), _capabilities(call)
    created = await asyncio.to_thread(listed_created, call.engine.info.model_path)
    served: list[ListedModel] = [
        {
            "name": tagged(name),
            "model": tagged(name),
            "modified_at": summary.modified.isoformat(),
            "size": summary.num_bytes,
            "digest": summary.digest,
            "details": about,
            "capabilities": capabilities,
        }
        for name, about in _served(call, summary)
    ]
    names = {one["name"] for one in served}
    return {"models": [*served, *(one for one in created if one["name"] not in names)]}


@router.get("/ps", responses=ERRORS)
async def list_loaded(call: CallOf) -> LoadedModels:
    """The served model by each of its names, and its adapters: they are always loaded."""
    summary, info = await _summary(call), call.engine.info
    return {
        "models": [
            {
                "name": tagged(name),
                "model": tagged(name),
                "size": summary.num_bytes,
                "digest": summary.digest,
                "details": about,
                "expires_at": _NEVER,
                "size_vram": 0 if info.device == "cpu" else summary.num_bytes,
                "context_length": info.max_model_len,
            }
            for name, about in _served(call, summary)
        ]
    }


def _served(call: Call, summary: ModelSummary) -> Iterator[tuple[str, ModelDetails]]:
    for name in call.model_names:
        yield name, details(summary)
    for adapter in call.engine.adapters:
        yield adapter.name, details(summary, tagged(call.model_names[0]))


@router.post("/show", responses=ERRORS)
async def show(body: ShowBody, call: CallOf) -> ShownModel:
    """The model's sizes, chat template, default options and capabilities."""
    asked = body.model or body.name
    if asked is not None and not call.serves(served_name(call, asked)) and (folder := find_created(asked)) is not None:
        return await asyncio.to_thread(shown_created, asked, folder)
    name = choose_model(call, asked)
    summary, info, tokenizer = await _summary(call), call.engine.info, call.engine.tokenizer
    parent = tagged(call.model_names[0]) if call.adapter is not None else ""
    template = "" if tokenizer is None else tokenizer.chat_template_source
    if tokenizer is not None and infill_marks(tokenizer) is not None:
        template = f"{{#- fill in the middle: .Suffix -#}}{template}"  # which Continue looks for
    parameters = parameters_text(call.engine.sampling_defaults, info)
    sizes = {"context_length": info.max_model_len, "vocab_size": info.vocab_size}
    shown: ShownModel = {
        "modelfile": modelfile(name, [_pair(line) for line in parameters.splitlines()]),
        "parameters": parameters,
        "template": template,
        "details": details(summary, parent),
        "model_info": model_info(summary, info.model_name, sizes),
        "capabilities": _capabilities(call),
        "modified_at": summary.modified.isoformat(),
    }
    return with_recipe(shown, recipe_of(Path(info.model_path)))


def _pair(line: str) -> tuple[str, str]:
    name, value = line.split(maxsplit=1)
    return name, value


async def _summary(call: Call) -> ModelSummary:
    info = call.engine.info
    return await asyncio.to_thread(summary_of, info.model_path, info.hf_overrides)


def _capabilities(call: Call) -> list[str]:
    encoder, tokenizer = call.engine.info.encoder, call.engine.tokenizer
    if encoder is not None:
        return ["embedding"] if encoder.task == "embed" else []
    has_template = tokenizer is not None and tokenizer.has_chat_template
    able = {
        "completion": True,
        "tools": has_template,
        "vision": call.engine.images is not None,
        "insert": tokenizer is not None and infill_marks(tokenizer) is not None,
        "thinking": has_template and call.chat_format.reasons,
    }
    return [name for name, is_able in able.items() if is_able]


@router.post("/pull", response_class=Response, responses=PROGRESS)
async def pull(body: PullBody, call: CallOf) -> Response:
    """Succeeds for what is served; another model needs a server of its own."""
    name = given_name(body)
    if not call.serves(served_name(call, name)):
        raise ModelNotFoundError(
            f"this server serves {call.model_names[0]!r} alone: to serve {name!r}, start another with "
            "penstock serve --model",
            "model",
        )
    return progress(body.stream, "pulling manifest", "verifying sha256 digest", "success")


@router.post("/copy", response_class=Response, responses=_DONE)
async def copy(body: CopyBody, request: Request, context: ContextOf, call: CallOf, serving: ServingOf) -> Response:
    """Serve the model, or an adapter, under one more name, until the server ends; or copy a created model. For
    operators only.
    """
    check_operator(request, context)
    name = check_new_name(body.destination, "destination")
    if not call.serves(served_name(call, body.source)) and (folder := find_created(body.source)) is not None:
        check_not_served(call, name, "destination")
        await asyncio.to_thread(_copy_created, folder, name)
        return Response()
    add_name(call, serving, body.source, name, "destination")
    return Response()


def _copy_created(folder: Path, name: str) -> None:
    try:
        copy_created(folder, name)
    except ConfigError as error:
        raise InvalidRequestError(f"destination: {error}", "destination") from error


def check_not_served(call: Call, name: str, field: str) -> None:
    """
    Raises:
        InvalidRequestError: the model, or an adapter, is served here by this name.
    """
    if call.serves(name):
        raise InvalidRequestError(f"{field}: {name!r} is served here under this name: choose another", field)


def add_name(call: Call, serving: ServingOf, source: str, name: str, field: str) -> None:
    """Give the served model or an adapter one more name, until the server ends.

    Raises:
        InvalidRequestError: the name is taken, or there are too many.
        ModelNotFoundError: `source` is not served.
    """
    choose_model(call, source)
    if call.adapter is None:
        serving.add_name(name, field)
        return
    if name in serving.model_names:
        raise InvalidRequestError(f"{field}: {name!r} is the model's own name: choose another", field)
    try:
        call.engine.adapters.add(replace(call.adapter, name=name))
    except AdapterError as error:
        raise InvalidRequestError(f"{field}: {error}", field) from error


@router.delete("/delete", response_class=Response, responses=_DONE)
async def delete(body: NameBody, request: Request, context: ContextOf, call: CallOf, serving: ServingOf) -> Response:
    """Remove a name that was added, or an adapter, whose files stay; or delete a created model. For operators only."""
    check_operator(request, context)
    name = served_name(call, given_name(body))
    if call.engine.adapters.remove(name) is not None or serving.remove_name(name, "model"):
        return Response()
    folder = find_created(name)
    if folder is None:
        raise ModelNotFoundError(f"there is no model {name!r} here", "model")
    if Path(call.engine.info.model_path).is_relative_to(folder):
        raise InvalidRequestError(f"model: {name!r} is the served model: stop the server first", "model")
    await asyncio.to_thread(remove_created, name)
    return Response()


def given_name(body: NameBody) -> str:
    """
    Raises:
        InvalidRequestError: there is none.
    """
    name = body.model or body.name
    if not name:
        raise InvalidRequestError("model: this parameter is required", "model")
    return name


def progress(stream: bool, *statuses: str) -> Response:
    """Progress that is complete: its last status or, streamed, a line for each."""
    if not stream:
        return Response(msgspec.json.encode({"status": statuses[-1]}), media_type="application/json")
    lines = b"".join(json_line({"status": status}) for status in statuses)
    return Response(lines, media_type=Frame.JSON_LINES.value)
