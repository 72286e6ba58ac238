"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them. For operators only."""

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from penstock.checkpoint.added import Added
from penstock.errors import AdapterError, InvalidRequestError, ModelNotFoundError
from penstock.server.admin import check_operator
from penstock.server.body import Body
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import CallOf, ServingOf
from penstock.server.model_changes import added_of, check_current, check_untaken
from penstock.server.openai_errors import ERRORS
from penstock.server.serving import ANY_MODEL

router = APIRouter(prefix="/v1", tags=["operation"], route_class=BodyRoute)

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "That it is done."},
    **ERRORS,
}


class LoadAdapterBody(Body):
    """The adapter to load, and its name."""

    lora_name: str = Field(description="Name by which requests select it, as their `model`.")
    lora_path: str = Field(description="A folder saved by PEFT or a GGUF file, on the server's machine, or a hub id.")
    load_inplace: bool = Field(False, description="Replace an adapter of this name, if there is one.")


class UnloadAdapterBody(Body):
    """The adapter to unload."""

    lora_name: str
    lora_int_id: int | None = Field(None, description="vLLM's number of the adapter; without effect, as in vLLM.")


@router.post("/load_lora_adapter", response_class=Response, responses=_ANSWERS)
async def load_adapter(
    body: LoadAdapterBody, request: Request, context: ContextOf, serving: ServingOf
) -> PlainTextResponse:
    """Register an adapter. It is checked before the call is answered, and loaded for the first request."""
    check_operator(request, context)
    adapters, name = serving.engine.adapters, body.lora_name
    if name in (*serving.names.all, *ANY_MODEL):
        raise InvalidRequestError(f"{name!r} is the model's own name: choose another", "lora_name")
    try:
        adapter = await asyncio.to_thread(adapters.read, name, body.lora_path)
        check_current(request, serving)
        check_untaken(request, name, "lora_name", but=(serving.names,))
        old = adapters.find(name)
        adapters.add(adapter, in_place=body.load_inplace)
    except AdapterError as error:
        raise InvalidRequestError(str(error)) from error
    await added_of(request).record(partial(Added.without_name, name=name))  # it ends with the server, as in vLLM
    if old is not None and all(other.path != old.path for other in adapters):
        await added_of(request).delete_files(old.path, serving.engine)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter", response_class=Response, responses=_ANSWERS)
async def unload_adapter(
    body: UnloadAdapterBody, request: Request, context: ContextOf, call: CallOf
) -> PlainTextResponse:
    """Unregister an adapter, of whose files only uploaded ones are deleted; requests that use it continue with it."""
    check_operator(request, context)
    adapters = call.engine.adapters
    if (removed := adapters.remove(body.lora_name)) is None:
        raise ModelNotFoundError(f"there is no adapter {body.lora_name!r} here", "lora_name")
    await added_of(request).record(partial(Added.without_name, name=body.lora_name))
    if all(other.path != removed.path for other in adapters):
        await added_of(request).delete_files(removed.path, call.engine)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
