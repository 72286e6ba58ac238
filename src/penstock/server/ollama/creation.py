"""Ollama's `/api/create`: a model of uploaded GGUF files, or of another model, with settings of its own."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.api.request import Adapter
from penstock.checkpoint.adapters.peft import CONFIG_FILE
from penstock.checkpoint.adapters.weights import WEIGHTS_FILE
from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.created import (
    Recipe,
    check_created_name,
    created_files,
    discard_created,
    find_created,
    name_created,
    write_adapter,
    write_created,
)
from penstock.checkpoint.hub_cache import find_cached
from penstock.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from penstock.server.admin import check_operator
from penstock.server.body import check_text
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import Call, CallOf, ServingOf
from penstock.server.listed import ListedOf
from penstock.server.ollama.blobs import find_blob
from penstock.server.ollama.library import PROGRESS, add_name, check_free, given_name, progress
from penstock.server.ollama.names import check_new_name, served_name
from penstock.server.ollama.schema import CreateBody
from penstock.text.tokenizer import Tokenizer

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)

_FILE_NAME = re.compile(r"\w[\w.+-]{0,199}\.gguf", re.ASCII)
_HELLO = {"role": "user", "content": "Hello"}


@router.post("/create", response_class=Response, responses=PROGRESS)
async def create(
    body: CreateBody, request: Request, context: ContextOf, call: CallOf, serving: ServingOf, listed: ListedOf
) -> Response:
    """Create a model, which `penstock serve NAME` serves: of uploaded files, or of another model by its name. With
    `from` alone, the served model or an adapter gets one more name, and with `adapters` the served model an adapter,
    until the server ends. For operators only.
    """
    check_operator(request, context)
    name = check_new_name(given_name(body), "model")
    if bool(body.source) == bool(body.files):
        raise InvalidRequestError(
            "a model is created either of `files`, uploaded to /api/blobs, or of the model that `from` names", "from"
        )
    if body.adapters:
        check_free(listed, name, "model")
        await _add_adapter(body, name, call)
        return progress(body.stream, "using existing layer", "writing manifest", "success")
    if body.source and not body.has_settings and call.serves(served_name(call, body.source)):
        check_free(listed, name, "model", but=serving)
        add_name(call, serving, body.source, name, "model")
        return progress(body.stream, "using existing layer", "writing manifest", "success")
    await asyncio.to_thread(check_free, listed, name, "model")
    files, base = _uploaded(body), None
    if body.source:
        base = await asyncio.to_thread(_base, call, body.source)
        files = _files_of(base)
    await asyncio.to_thread(_create, name, files, _recipe(body, base))
    return progress(body.stream, "parsing GGUF", "writing manifest", "success")


async def _add_adapter(body: CreateBody, name: str, call: Call) -> None:
    """Store an adapter of the served model, and serve it by its name, until the server ends.

    Raises:
        InvalidRequestError: it cannot be used, or goes with settings.
    """
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
        folder = write_adapter(name, files)
        try:
            return call.engine.adapters.read(name, str(folder))
        except ConfigError:
            discard_created(folder)
            raise

    try:
        call.engine.adapters.add(await asyncio.to_thread(store))
    except ConfigError as error:
        raise InvalidRequestError(f"adapters: {error}", "adapters") from error


def _uploaded(body: CreateBody) -> dict[str, Path]:
    files = {}
    for name, digest in body.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise InvalidRequestError(f"files: only GGUF files (NAME.gguf) are taken, not {name[:80]!r}", "files")
        files[name] = find_blob(digest, "files")
    return files


def _base(call: Call, source: str) -> Checkpoint:
    """The model that `from` names: the served one, a created one, or one in the hub's cache; never a path.

    Raises:
        ModelNotFoundError: there is none.
    """
    name = served_name(call, source)
    path: str | None = None
    if name in call.model_names:
        path = call.engine.info.model_path
    elif (folder := find_created(source)) is not None:
        path = str(folder)
    elif (alias := read_aliases().get(name)) is not None:
        path = alias
    elif (cached := find_cached(name)) is not None:
        path = str(cached.path)
    if path is None:
        raise ModelNotFoundError(
            f"there is no model {source!r} on this machine: penstock list prints them, and penstock pull downloads one",
            "from",
        )
    try:
        return open_checkpoint(path)
    except ConfigError as error:
        raise InvalidRequestError(f"from: {error}", "from") from error


def _files_of(base: Checkpoint) -> dict[str, Path]:
    """The files of a model by name."""
    if base.recipe is not None:
        return created_files(base.path if base.gguf is None else base.path.parent)
    files = base.gguf.files if base.gguf is not None else list(base.path.iterdir())
    return {file.name: file.absolute() for file in files}


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


def _create(name: str, files: Mapping[str, Path], recipe: Recipe) -> None:
    """Write a model, if it can be read.

    Raises:
        InvalidRequestError: it cannot, or there is no room for it.
    """
    folder: Path | None = None
    try:
        check_created_name(name)
        folder = write_created(files, recipe)
        _check(folder, recipe)
        name_created(folder, name)
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
