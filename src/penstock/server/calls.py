"""`GET /v1/requests/{id}`: the result or progress of a call, for clients that lost the answer. Needs a journal."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from typing_extensions import TypedDict

from penstock.api.request import FinishReason, RequestOutput
from penstock.errors import RequestNotFoundError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.recovery.journal_rows import Entry
from penstock.server.call_context import ContextOf
from penstock.server.dialect import ServingOf
from penstock.server.openai_errors import ERRORS

router = APIRouter(prefix="/v1", tags=["operation"])


async def _find_engine(request: Request) -> Callable[[str], Awaitable[AsyncEngine]] | None:
    models = request.app.state.models
    return None if models is None else models.served.engine_of_call


FindEngine = Annotated[Callable[[str], Awaitable[AsyncEngine]] | None, Depends(_find_engine)]
"""Finds the engine of a call's model by the call's name; None: there is one model."""


class AnswerSoFar(TypedDict):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: str | None


class PromptSoFar(TypedDict):
    id: str
    prompt_tokens: int
    answers: list[AnswerSoFar]


class CallSoFar(TypedDict):
    id: str
    object: str
    created: int
    finished: bool
    prompts: list[PromptSoFar]


@router.get("/requests/{name}", responses={404: ERRORS[404], "default": ERRORS["default"]})
async def look_up(name: str, context: ContextOf, serving: ServingOf, find_engine: FindEngine = None) -> CallSoFar:
    """The result or the progress of a call, by the id in its answer or the `x-request-id` that came with it."""
    engine = serving.engine if find_engine is None else await find_engine(name)
    found = await engine.journaled_calls.look_up(name, context.caller.tenant)
    if not found:
        hint = "" if engine.journaled else ": the server keeps none without --journal"
        raise RequestNotFoundError(f"there is no request {name!r} here{hint}", "id")
    first = found[0][0]
    return {
        "id": first.call,
        "object": "request",
        "created": int(first.accepted),
        "finished": all(output.finished for _, output in found),
        "prompts": [_prompt(entry, output) for entry, output in found],
    }


def _prompt(entry: Entry, output: RequestOutput) -> PromptSoFar:
    answers: list[AnswerSoFar] = [
        {
            "index": answer.index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "error": answer.error,
        }
        for answer in output.outputs
    ]
    return {"id": entry.record.request.request_id, "prompt_tokens": len(output.prompt_token_ids), "answers": answers}
