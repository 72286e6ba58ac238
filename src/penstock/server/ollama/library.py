"""Ollama's routes about models: the served model, its names and its adapters, and created models."""

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.checkpoint.added import Added, AddedAdapter, delete_created, other_names
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.created import LATEST, copy_created, find_created, recipe_of
from penstock.checkpoint.summary import ModelSummary, summary_of
from penstock.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from penstock.frontend.model_names import MAX_NAMES, ModelNames
from penstock.server.admin import check_operator
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import Call
from penstock.server.listed import Listed, ListedOf, find_listed, list_served
from penstock.server.model_changes import added_of, check_untaken, holder_of
from penstock.server.ollama.created_models import capabilities_of, listed_created, modelfile, shown_files, with_recipe
from penstock.server.ollama.errors import ERRORS
from penstock.server.ollama.infill import infill_marks
from penstock.server.ollama.model_facts import details, model_info, parameters_text
from penstock.server.ollama.names import check_new_name, choose_model, tagged
from penstock.server.ollama.schema import (
    CopyBody,
    ListedModel,
    ListedModels,
    LoadedModel,
    LoadedModels,
    ModelDetails,
    NameBody,
    Progress,
    ShowBody,
    ShownModel,
    Version,
)
from penstock.server.serving import Serving, unknown_model
from penstock.server.streams import JSON_LINES, Frame, json_line

if TYPE_CHECKING:
    from penstock.server.models import Models

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)

_NEVER = "2318-01-01T00:00:00Z"
"""When a model that stays loaded is unloaded: a time that every client can compute with."""
_LONGEST = 100 * 365 * 86_400.0
"""Seconds that count as never."""
PROGRESS: dict[int | str, dict[str, Any]] = {200: {"model": Progress, "content": JSON_LINES}, **ERRORS}
_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "It is done.", "content": {}}, **ERRORS}


@router.get("/version", responses=ERRORS)
async def version() -> Version:
    """The server's version: Penstock's."""
    return {"version": __version__}


@router.get("/tags", responses=ERRORS)
async def list_models(context: ContextOf, listed: ListedOf) -> ListedModels:
    """The served models by each of their names, their adapters, and models that were created, which other servers
    serve."""
    served: list[ListedModel] = []
    for model in listed:
        summary = await asyncio.to_thread(_summary_of, model)
        if model.serving is None:
            capabilities = await asyncio.to_thread(_unloaded_capabilities, model.path)
        else:
            capabilities = _capabilities(model.serving)
        served += (
            {
                "name": tagged(name),
                "model": tagged(name),
                "modified_at": summary.modified.isoformat(),
                "size": summary.num_bytes,
                "digest": summary.digest,
                "details": about,
                "capabilities": capabilities,
            }
            for name, about in _served(model, summary)
        )
    created = await asyncio.to_thread(listed_created, *(model.path for model in listed))
    names = {model["name"] for model in served}
    others = (model for model in created if model["name"] not in names and context.caller.may_use(model["name"]))
    return {"models": [*served, *others]}


@router.get("/ps", responses=ERRORS)
async def list_loaded(listed: ListedOf) -> LoadedModels:
    """The loaded models by each of their names, and their adapters."""
    models: list[LoadedModel] = []
    for model in listed:
        if model.serving is None or model.status.state != "loaded":
            continue
        summary, info = await asyncio.to_thread(_summary_of, model), model.serving.engine.info
        size, expires = model.status.num_bytes or summary.num_bytes, _expiry(model.status.expires_in)
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
            for name, about in _served(model, summary)
        )
    return {"models": models}


def _expiry(seconds: float) -> str:
    if seconds > _LONGEST:
        return _NEVER
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def _served(model: Listed, summary: ModelSummary) -> Iterator[tuple[str, ModelDetails]]:
    for name in model.names:
        yield name, details(summary)
    parent = "" if model.shown_name is None else tagged(model.shown_name)
    for adapter in model.adapters:
        yield adapter.name, details(summary, parent)


def _summary_of(model: Listed) -> ModelSummary:
    if model.serving is not None:
        info = model.serving.engine.info
        return summary_of(info.model_path, info.hf_overrides)
    return summary_of(model.path) if os.path.exists(model.path) else ModelSummary()  # of a hub id nothing is downloaded


def _unloaded_capabilities(path: str) -> list[str]:
    """What a model that was never loaded can do, by its files; [] if they are not on this machine."""
    try:
        return capabilities_of(open_checkpoint(path)) if os.path.exists(path) else []
    except CheckpointError:
        return []


@router.post("/show", responses=ERRORS)
async def show(body: ShowBody, context: ContextOf, listed: ListedOf) -> ShownModel:
    """The model's sizes, chat template, default options and capabilities; of one that was never loaded as its files
    say.
    """
    asked, path = body.model or body.name, None
    if asked is not None:
        context.caller.check_model(asked)
    model = find_listed(listed, asked)
    if model is not None and model.serving is not None:
        return await _shown(asked, Call(context, model.serving), model.serving)
    if model is not None:
        path = model.path
    elif asked is not None and (folder := await asyncio.to_thread(find_created, asked)) is not None:
        path = str(folder)
    name = asked or (model.name if model is not None else "")
    if path is None:
        raise unknown_model(name, [own for model in listed for own in model.names])
    try:
        return await asyncio.to_thread(shown_files, name, path)
    except ConfigError as error:
        raise InvalidRequestError(f"the model {name!r} cannot be read: {error}", "model") from error


async def _shown(asked: str | None, call: Call, serving: Serving) -> ShownModel:
    name = await choose_model(call, asked)
    summary, info, tokenizer = await _summary(call), call.engine.info, call.engine.tokenizer
    parent = tagged(call.model_names[0]) if call.adapter is not None and call.model_names else ""
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
        "model_info": model_info(summary, info.model_name if call.model_names else call.model_name, sizes),
        "capabilities": _capabilities(serving),
        "modified_at": summary.modified.isoformat(),
    }
    return with_recipe(shown, recipe_of(Path(info.model_path)))


def _pair(line: str) -> tuple[str, str]:
    name, value = line.split(maxsplit=1)
    return name, value


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
        "vision": engine.takes_images,
        "insert": tokenizer is not None and infill_marks(tokenizer) is not None,
        "thinking": has_template and serving.chat_format.reasons,
    }
    return [name for name, is_able in able.items() if is_able]


@router.post("/copy", response_class=Response, responses=_DONE)
async def copy(body: CopyBody, request: Request, context: ContextOf) -> Response:
    """Serve the model, or an adapter, under one more name; or copy a created model. For operators only."""
    check_operator(request, context)
    name = check_new_name(body.destination, "destination")
    async with added_of(request).one_at_a_time:
        model, listed = holder_of(request, body.source), await list_served(request, context)
        if model is not None:
            await check_free(request, listed, name, "destination", but=(model.names,))
            await add_name(request, body.source, name, "destination")
        elif not _is_deleted(body.source, listed) and (folder := await asyncio.to_thread(find_created, body.source)):
            await check_free(request, listed, name, "destination")
            await asyncio.to_thread(_copy_created, folder, name)
        else:
            raise unknown_model(body.source, [own for one in listed for own in one.names])
    return Response()


def _copy_created(folder: Path, name: str) -> None:
    try:
        copy_created(folder, name)
    except ConfigError as error:
        raise InvalidRequestError(f"destination: {error}", "destination") from error


async def check_free(
    request: Request, listed: Sequence[Listed], name: str, field: str, *, but: Collection[ModelNames] = ()
) -> None:
    """
    Args:
        but: models that may have the name already.

    Raises:
        InvalidRequestError: a model or an adapter is served by this name, or its files are those of a served model.
    """
    check_untaken(request, name, field, but=but)
    if (folder := await asyncio.to_thread(find_created, name)) is not None:
        others = [one for one in listed if one.model.names not in but]
        await asyncio.to_thread(check_unused, others, folder, field)


def check_unused(listed: Sequence[Listed], folder: Path, field: str) -> None:
    """
    Raises:
        InvalidRequestError: the files of this created model are those of a served one, loaded or not.
    """
    for model in users_of(listed, folder):
        served = model.shown_name or model.name
        raise InvalidRequestError(
            f"{field}: its files are those of the served model {served!r}: stop the server first", field
        )


def users_of(listed: Sequence[Listed], folder: Path) -> list[Listed]:
    """The served models, loaded or not, whose files are those of a created model."""
    return [model for model in listed if Path(model.path).is_relative_to(folder) or find_created(model.path) == folder]


async def add_name(request: Request, source: str, name: str, field: str) -> None:
    """Give a model or an adapter one more name, which no other model has.

    Raises:
        InvalidRequestError: the name is taken, or there are too many.
        ModelNotFoundError: there is no such model any more.
    """
    model = holder_of(request, source)
    if model is None:
        raise unknown_model(source, [])
    names = model.names
    check_untaken(request, name, field, but=(names,))
    source = next(known for known in (source, source.removesuffix(LATEST)) if model.has_name(known))
    adapter = next((one for one in model.adapters if one.name == source), None)
    if name == source or (adapter is None and name in names.all):
        return
    if model.has_name(name):
        raise InvalidRequestError(f"{field}: {name!r} is a name of this model or its adapter: choose another", field)
    if adapter is not None:
        model.copy_adapter(source, name)
        change = partial(Added.with_adapter, name=name, adapter=AddedAdapter(names.own, adapter.path))
    elif names.add(name):
        change = partial(Added.with_name, name=name, model=names.own)
    else:
        raise InvalidRequestError(f"{field}: the model has {MAX_NAMES} names already: delete some", field)
    await added_of(request).record(change)


@router.delete("/delete", response_class=Response, responses=_DONE)
async def delete(body: NameBody, request: Request, context: ContextOf) -> Response:
    """Remove a name of a model that has others, an adapter, of whose files only uploaded ones are deleted, or one of
    several models, which is unloaded after its open requests; and delete a created model. For operators only.
    """
    check_operator(request, context)
    async with added_of(request).one_at_a_time:
        await _delete(given_name(body), request, await list_served(request, context))
    return Response()


async def _delete(name: str, request: Request, listed: Sequence[Listed]) -> None:
    model = find_listed(listed, name)
    if model is None and _is_deleted(name, listed):
        raise unknown_model(name, [own for one in listed for own in one.names])
    if model is not None:
        name = name if model.has_name(name) else name.removesuffix(LATEST)
        if await _remove_part(request, model, name):
            return
        await _stop_serving(request, model)
        listed, name = [other for other in listed if other is not model], model.name
    own_name = name.removesuffix(LATEST)
    folder = await asyncio.to_thread(find_created, name)  # which may wait for another process
    if model is not None:
        if folder is None or not await asyncio.to_thread(users_of, [model], folder):
            return
        if await asyncio.to_thread(users_of, listed, folder):
            return
        if await asyncio.to_thread(other_names, own_name):
            return
    is_forgotten = model is None and await added_of(request).forget(own_name)
    if folder is None and not is_forgotten:
        raise ModelNotFoundError(f"there is no model {name!r} here", "model")
    if folder is not None:
        await asyncio.to_thread(check_unused, listed, folder, "model")
        await asyncio.to_thread(_delete_created, name)


def _delete_created(name: str) -> None:
    try:
        delete_created(name)
    except CheckpointError as error:
        raise InvalidRequestError(f"model: {error}", "model") from error


def _is_deleted(name: str, listed: Sequence[Listed]) -> bool:
    """Whether this was the name of a model that is still served by others, with its files."""
    return any(model.name == name.removesuffix(LATEST) and not model.has_name(model.name) for model in listed)


async def _remove_part(request: Request, model: Listed, name: str) -> bool:
    """Remove an adapter, or a name of a model that has others; returns whether there was one."""
    removed = model.model.remove_adapter(name)
    names = model.model.names
    if removed is None and not names.remove(name):
        return False
    without = Added.without_own_name if removed is None and name == names.own else Added.without_name
    await added_of(request).record(partial(without, name=name))
    if removed is not None and all(other.path != removed.path for other in model.model.adapters):
        await added_of(request).delete_files(removed.path, model.model.engine)  # else a copy has them
    return True


async def _stop_serving(request: Request, model: Listed) -> None:
    """
    Raises:
        InvalidRequestError: it is the only one.
    """
    models: Models | None = request.app.state.models
    if models is None:
        raise InvalidRequestError(f"model: {model.name!r} is the served model itself: stop the server instead", "model")
    adapters = {adapter.path for adapter in model.model.adapters}
    models.served.remove_model(model.name)
    await added_of(request).record(partial(Added.without_model, name=model.name))
    for path in adapters:
        await added_of(request).delete_files(path, model.model.engine)


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
