"""Ollama's `/api/create`: a model of uploaded GGUF files, or of another model, with settings of its own."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.api.request import Adapter
from penstock.checkpoint.adapters.peft import CONFIG_FILE
from penstock.checkpoint.adapters.weights import WEIGHTS_FILE
from penstock.checkpoint.added import Added, AddedAdapter
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint, weights_size
from penstock.checkpoint.created import (
    LATEST,
    Recipe,
    check_created_name,
    discard_created,
    find_created,
    name_adapter,
    name_created,
    remove_adapter,
    write_adapter,
    write_created,
)
from penstock.checkpoint.local import find_local
from penstock.errors import ConfigError, InvalidRequestError, ModelNotFoundError, PenstockError
from penstock.server.admin import check_operator
from penstock.server.body import check_text
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import CallContext, ContextOf
from penstock.server.dialect import Call, serving_of
from penstock.server.listed import Listed, find_listed, list_served
from penstock.server.model_changes import added_of, check_current, check_untaken, holder_of, still_served
from penstock.server.ollama.blobs import find_blob
from penstock.server.ollama.library import PROGRESS, add_name, check_free, given_name, progress, users_of
from penstock.server.ollama.names import check_new_name, served_name
from penstock.server.ollama.schema import CreateBody
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.server.models import Models

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)

_FILE_NAME = re.compile(r"\w[\w.+-]{0,199}\.gguf", re.ASCII)
_HELLO = {"role": "user", "content": "Hello"}


@router.post("/create", response_class=Response, responses=PROGRESS)
async def create(body: CreateBody, request: Request, context: ContextOf) -> Response:
    """Create a model, which `penstock serve NAME` serves, and a server of several at once: of uploaded files, or of
    another model by its name. With `from` alone, the served model or an adapter gets one more name, and with
    `adapters` the served model an adapter. For operators only.
    """
    check_operator(request, context)
    name = check_new_name(given_name(body), "model")
    if bool(body.source) == bool(body.files):
        raise InvalidRequestError(
            "a model is created either of `files`, uploaded to /api/blobs, or of the model that `from` names", "from"
        )
    steps = ("using existing layer", "writing manifest", "success")
    if body.adapters:
        await check_free(request, await list_served(request, context), name, "model")
        await _add_adapter(body, name, request, context)
        return progress(body.stream, *steps)
    async with added_of(request).one_at_a_time:
        listed = await list_served(request, context)
        if body.source and not body.has_settings and (model := holder_of(request, body.source)) is not None:
            await check_free(request, listed, name, "model", but=(model.names,))
            await add_name(request, body.source, name, "model")
            return progress(body.stream, *steps)
        await _create_model(body, name, request, listed)
    return progress(body.stream, "parsing GGUF", *steps[1:])


async def _create_model(body: CreateBody, name: str, request: Request, listed: Sequence[Listed]) -> None:
    models: Models | None = request.app.state.models
    replaced = await asyncio.to_thread(_replaced, listed, name) if models is not None else []
    for model in replaced:
        if model.name == name and not model.has_name(name):
            raise still_served(name, model.model.names, "model")
    own = [model.model.names for model in replaced]
    await check_free(request, listed, name, "model", but=own)
    files, base = _uploaded(body), None
    if body.source:
        base = await asyncio.to_thread(_base, listed, body.source)
        files = base.files
    folder = await asyncio.to_thread(_create, name, files, _recipe(body, base))
    if models is not None:
        await _serve_created(request, models, name, str(folder), [model.name for model in replaced])


async def _serve_created(request: Request, models: "Models", name: str, folder: str, replaced: Sequence[str]) -> None:
    """Serve a created model, in place of those that had its files.

    Raises:
        InvalidRequestError: another model has got its name meanwhile.
    """
    names = [served for served in replaced if served in models.served.models] or [name]
    for served in names:
        current = models.served.models.get(served)
        check_untaken(request, served, "model", but=() if current is None else (current.names,))
        models.served.add_model(served, folder)
    if name in names:
        await added_of(request).record(partial(Added.with_model, name=name))


def _replaced(listed: Sequence[Listed], name: str) -> list[Listed]:
    """The served models that the new one takes the place of: those of the created model of this name."""
    folder = find_created(name)
    return [] if folder is None else users_of(listed, folder)


async def _add_adapter(body: CreateBody, name: str, request: Request, context: CallContext) -> None:
    """Store an adapter of the served model, and serve it by its name.

    Raises:
        InvalidRequestError: it cannot be used, or goes with settings.
    """
    serving = await serving_of(request, context)
    call = Call(context, serving)
    if body.has_settings or body.source is None or served_name(call, body.source) not in call.model_names:
        raise InvalidRequestError(
            "adapters: an adapter is added to the served model, which `from` names, without `files` and settings "
            "(template, system, parameters, messages, license)",
            "adapters",
        )
    is_gguf = len(body.adapters) == 1 and all(map(_FILE_NAME.fullmatch, body.adapters))
    if not is_gguf and body.adapters.keys() != {CONFIG_FILE, WEIGHTS_FILE}:
        raise InvalidRequestError(
            f"adapters: {CONFIG_FILE} and {WEIGHTS_FILE} of PEFT are taken, or one GGUF file (NAME.gguf)", "adapters"
        )
    files = {file: find_blob(digest, "adapters") for file, digest in body.adapters.items()}

    def store() -> Adapter:
        folder = write_adapter(files, added_of(request).path)
        try:
            adapter = call.engine.adapters.read(name, str(folder))
            return replace(adapter, path=str(name_adapter(folder, name)))
        finally:
            discard_created(folder)

    try:
        adapter = await asyncio.to_thread(store)
    except ConfigError as error:
        raise InvalidRequestError(f"adapters: {error}", "adapters") from error
    try:
        check_current(request, serving)
        check_untaken(request, name, "model")
        call.engine.adapters.add(adapter)
    except PenstockError:
        await asyncio.to_thread(remove_adapter, Path(adapter.path))
        raise
    added = AddedAdapter(serving.names.own, adapter.path)
    await added_of(request).record(partial(Added.with_adapter, name=name, adapter=added))


def _uploaded(body: CreateBody) -> dict[str, Path]:
    files = {}
    for name, digest in body.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise InvalidRequestError(f"files: only GGUF files (NAME.gguf) are taken, not {name[:80]!r}", "files")
        files[name] = find_blob(digest, "files")
    return files


def _base(listed: Sequence[Listed], source: str) -> Checkpoint:
    """The model that `from` names: a served one, or one that `find_local` finds.

    Raises:
        ModelNotFoundError: there is none.
    """
    model = find_listed(listed, source)
    is_served = model is not None and bool({source, source.removesuffix(LATEST)} & {*model.names})
    try:
        found = model.path if model is not None and is_served else find_local(source)
        if found is not None and os.path.exists(found):
            base = open_checkpoint(str(found))
            weights_size(base.path)  # all of them: a download may be under way
            return base
    except ConfigError as error:
        raise InvalidRequestError(f"from: {error}", "from") from error
    raise ModelNotFoundError(
        f"there is no model {source!r} on this machine: penstock list prints them, and penstock pull downloads one",
        "from",
    )


def _recipe(body: CreateBody, base: Checkpoint | None) -> Recipe:
    """The settings of a body over those of its base."""
    old = (base.recipe if base is not None else None) or Recipe()
    license = [body.license] if isinstance(body.license, str) else body.license
    for field in ("template", "system"):
        check_text(getattr(body, field) or "", field)
    given = body.parameters.model_dump(exclude_none=True) if body.parameters is not None else {}
    messages = [{"role": message.role, "content": check_text(message.content, "messages")} for message in body.messages]
    return Recipe(
        base=body.source or "",
        template=body.template or old.template,
        system=old.system if body.system is None else body.system,
        parameters=_stored({**old.parameters, **given}),
        messages=messages or old.messages,
        license=license or old.license,
    )


def _stored(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, without those that have no effect."""
    stored = dict(given)
    if "top_k" in stored:
        stored["top_k"] = max(stored["top_k"], 0)
    if stored.get("num_predict", 0) < 0:
        del stored["num_predict"]
    return stored


def _create(name: str, files: Mapping[str, Path], recipe: Recipe) -> Path:
    """Write a model, if it can be read. Returns its folder.

    Raises:
        InvalidRequestError: it cannot, or there is no room for it.
    """
    folder: Path | None = None
    try:
        check_created_name(name)
        folder = write_created(files, recipe)
        _check(folder, recipe)
        return name_created(folder, name)
    except ConfigError as error:
        said = str(error) if folder is None else str(error).replace(f"{folder}/", "").replace(str(folder), name)
        raise InvalidRequestError(f"the model cannot be created: {said}") from error
    finally:
        if folder is not None:
            discard_created(folder)


def _check(folder: Path, recipe: Recipe) -> None:
    """Read the model, and render a conversation.

    Raises:
        ConfigError: it cannot be read.
        InvalidRequestError: the chat template is no Jinja, or rejects the messages.
    """
    tokenizer = Tokenizer.load(open_checkpoint(str(folder)).path)
    if not (recipe.template or recipe.system or recipe.messages):
        return
    if tokenizer is None or not tokenizer.has_chat_template:
        raise InvalidRequestError("system and messages need a chat template, and the model has none", "template")
    try:
        tokenizer.apply_chat_template([_HELLO])
    except InvalidRequestError as error:
        hint = " (templates are Jinja, as in tokenizer_config.json, not Ollama's Go templates)" * bool(recipe.template)
        raise InvalidRequestError(f"template: {error}{hint}", "template") from error
    finally:
        with suppress(OSError):
            tokenizer.close()
