"""Ollama's routes about models: the served model, its names and its adapters."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.checkpoint.summary import ModelSummary, summary_of
from penstock.errors import AdapterError, InvalidRequestError, ModelNotFoundError
from penstock.server.admin import check_operator
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import Call, CallOf, Serving, ServingOf
from penstock.server.listed import Listed, ListedOf
from penstock.server.ollama.errors import ERRORS
from penstock.server.ollama.infill import infill_marks
from penstock.server.ollama.model_facts import details, model_info, parameters_text
from penstock.server.ollama.names import check_new_name, choose_model, served_name, tagged
from penstock.server.ollama.schema import (
    CopyBody,
    CreateBody,
    ListedModel,
    ListedModels,
    LoadedModel,
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
"""When a model that stays loaded is unloaded: a time that every client can compute with."""
_LONGEST = 100 * 365 * 86_400.0
"""Seconds that count as never."""
_PROGRESS: dict[int | str, dict[str, Any]] = {200: {"model": Progress, "content": JSON_LINES}, **ERRORS}
_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "It is done.", "content": {}}, **ERRORS}


@router.get("/version", responses=ERRORS)
async def version() -> Version:
    """The server's version: Penstock's."""
    return {"version": __version__}


@router.get("/tags", responses=ERRORS)
async def list_models(listed: ListedOf) -> ListedModels:
    """The served models by each of their names, and their adapters."""
    models: list[ListedModel] = []
    for one in listed:
        summary = await asyncio.to_thread(_summary_of, one)
        capabilities = ["completion"] if one.serving is None else _capabilities(one.serving)
        models += (
            {
                "name": tagged(name),
                "model": tagged(name),
                "modified_at": summary.modified.isoformat(),
                "size": summary.num_bytes,
                "digest": summary.digest,
                "details": about,
                "capabilities": capabilities,
            }
            for name, about in _served(one, summary)
        )
    return {"models": models}


@router.get("/ps", responses=ERRORS)
async def list_loaded(listed: ListedOf) -> LoadedModels:
    """The loaded models by each of their names, and their adapters."""
    models: list[LoadedModel] = []
    for one in listed:
        if one.serving is None or one.status.state != "loaded":
            continue
        summary, info = await asyncio.to_thread(_summary_of, one), one.serving.engine.info
        size, expires = one.status.num_bytes or summary.num_bytes, _expiry(one.status.expires_in)
        models += (
            {
                "name": tagged(name),
                "model": tagged(name),
                "size": size,
                "digest": summary.digest,
                "details": about,
                "expires_at": expires,
                "size_vram": 0 if info.device == "cpu" else size,
                "context_length": info.max_model_len,
            }
            for name, about in _served(one, summary)
        )
    return {"models": models}


def _expiry(seconds: float) -> str:
    if seconds > _LONGEST:
        return _NEVER
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def _served(one: Listed, summary: ModelSummary) -> Iterator[tuple[str, ModelDetails]]:
    for name in (one.name,) if one.serving is None else one.serving.model_names:
        yield name, details(summary)
    for adapter in () if one.serving is None else one.serving.engine.adapters:
        yield adapter.name, details(summary, tagged(one.name))


def _summary_of(one: Listed) -> ModelSummary:
    info = None if one.serving is None else one.serving.engine.info
    return summary_of(one.path) if info is None else summary_of(info.model_path, info.hf_overrides)


@router.post("/show", responses=ERRORS)
async def show(body: ShowBody, call: CallOf, serving: ServingOf) -> ShownModel:
    """The model's sizes, chat template, default options and abilities."""
    name = choose_model(call, body.model or body.name)
    summary, info, tokenizer = await _summary(call), call.engine.info, call.engine.tokenizer
    parent = tagged(call.model_names[0]) if call.adapter is not None else ""
    template = "" if tokenizer is None else tokenizer.chat_template_source
    if tokenizer is not None and infill_marks(tokenizer) is not None:
        template = f"{{#- fill in the middle: .Suffix -#}}{template}"  # which Continue looks for
    parameters = parameters_text(call.engine.sampling_defaults, info)
    lines = (f"PARAMETER {' '.join(line.split(maxsplit=1))}" for line in parameters.splitlines())
    return {
        "modelfile": "\n".join([f"FROM {name}", *lines]),
        "parameters": parameters,
        "template": template,
        "details": details(summary, parent),
        "model_info": model_info(summary, info),
        "capabilities": _capabilities(serving),
        "modified_at": summary.modified.isoformat(),
    }


async def _summary(call: Call) -> ModelSummary:
    info = call.engine.info
    return await asyncio.to_thread(summary_of, info.model_path, info.hf_overrides)


def _capabilities(serving: Serving) -> list[str]:
    engine = serving.engine
    encoder, tokenizer = engine.info.encoder, engine.tokenizer
    if encoder is not None:
        return ["embedding"] if encoder.task == "embed" else []
    has_template = tokenizer is not None and tokenizer.has_chat_template
    able = {
        "completion": True,
        "tools": has_template,
        "vision": engine.images is not None,
        "insert": tokenizer is not None and infill_marks(tokenizer) is not None,
        "thinking": has_template and serving.chat_format.reasons,
    }
    return [name for name, is_able in able.items() if is_able]


@router.post("/pull", response_class=Response, responses=_PROGRESS)
async def pull(body: PullBody, call: CallOf) -> Response:
    """Succeeds for what is served; another model must be added to the server's options."""
    name = _given_name(body)
    if not call.serves(served_name(call, name)):
        raise ModelNotFoundError(
            f"this server serves {call.model_names[0]!r} alone: to serve {name!r}, start another with "
            "penstock serve --model",
            "model",
        )
    return _progress(body.stream, "pulling manifest", "verifying sha256 digest", "success")


@router.post("/copy", response_class=Response, responses=_DONE)
async def copy(body: CopyBody, request: Request, context: ContextOf, call: CallOf, serving: ServingOf) -> Response:
    """Serve the model, or an adapter, under one more name, until the server ends. For operators only."""
    check_operator(request, context)
    _add_name(call, serving, body.source, check_new_name(body.destination, "destination"), "destination")
    return Response()


@router.post("/create", response_class=Response, responses=_PROGRESS)
async def create(body: CreateBody, request: Request, context: ContextOf, call: CallOf, serving: ServingOf) -> Response:
    """As `/api/copy`, of the model in `from`. For operators only."""
    check_operator(request, context)
    if not body.source:
        raise InvalidRequestError(
            "from: this parameter is required: a model is created from the served model or an adapter, and an adapter "
            "is loaded by /v1/load_lora_adapter",
            "from",
        )
    _add_name(call, serving, body.source, check_new_name(_given_name(body), "model"), "model")
    return _progress(body.stream, "using existing layer", "writing manifest", "success")


def _add_name(call: Call, serving: ServingOf, source: str, name: str, field: str) -> None:
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
    """Remove a name that was added, or an adapter; files stay. For operators only."""
    check_operator(request, context)
    name = served_name(call, _given_name(body))
    if call.engine.adapters.remove(name) is None and not serving.remove_name(name, "model"):
        raise ModelNotFoundError(f"there is no model {name!r} here", "model")
    return Response()


def _given_name(body: NameBody) -> str:
    name = body.model or body.name
    if not name:
        raise InvalidRequestError("model: this parameter is required", "model")
    return name


def _progress(stream: bool, *statuses: str) -> Response:
    """Progress that is complete: its last status or, streamed, a line for each."""
    if not stream:
        return Response(msgspec.json.encode({"status": statuses[-1]}), media_type="application/json")
    lines = b"".join(json_line({"status": status}) for status in statuses)
    return Response(lines, media_type=Frame.JSON_LINES.value)
