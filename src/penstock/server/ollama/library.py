"""Ollama's routes about models: the served model, its names and its adapters."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
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
from penstock.server.dialect import Call, CallOf, ServingOf
from penstock.server.ollama.errors import ERRORS
from penstock.server.ollama.infill import infill_marks
from penstock.server.ollama.model_facts import details, model_info, parameters_text
from penstock.server.ollama.names import check_new_name, choose_model, served_name, tagged
from penstock.server.ollama.schema import (
    CopyBody,
    CreateBody,
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
_PROGRESS: dict[int | str, dict[str, Any]] = {200: {"model": Progress, "content": JSON_LINES}, **ERRORS}
_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "It is done.", "content": {}}, **ERRORS}


@router.get("/version", responses=ERRORS)
async def version() -> Version:
    """The server's version: Penstock's."""
    return {"version": __version__}


@router.get("/tags", responses=ERRORS)
async def list_models(call: CallOf) -> ListedModels:
    """The served model by each of its names, and its adapters."""
    summary, capabilities = await _summary(call), _capabilities(call)
    return {
        "models": [
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
    }


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
        "capabilities": _capabilities(call),
        "modified_at": summary.modified.isoformat(),
    }


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


@router.post("/pull", response_class=Response, responses=_PROGRESS)
async def pull(body: PullBody, call: CallOf) -> Response:
    """Succeeds for what is served; another model needs a server of its own."""
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
