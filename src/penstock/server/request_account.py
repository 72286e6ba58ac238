"""Routes that explain a request's latency and show the engine's steps."""

import asyncio
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.errors import NotPermittedError, RequestNotFoundError
from penstock.frontend.history import History, RequestRecord, TimelineEvent, chrome_trace
from penstock.server.call_context import ContextOf
from penstock.server.dialect import ServingOf
from penstock.server.openai_errors import ERRORS

router = APIRouter(tags=["operation"])


class RequestAccount(TypedDict):
    id: str
    state: Literal["open", "ended"]
    prompt_tokens: int
    priority: int
    tenant: str
    seconds_to_first_token: float | None
    seconds: float | None
    finish_reasons: list[str]
    events: list[TimelineEvent]


class Why(TypedDict):
    requests: list[RequestAccount]


@router.get("/v1/requests/{name}/why", responses={404: ERRORS[404], "default": ERRORS["default"]})
async def why(name: str, context: ContextOf, serving: ServingOf) -> Why:
    """A live or recent call, step by step: waiting and for what, admission, chunks, cache hits, preemptions.

    By the id in its answer or its `x-request-id`. Times are seconds since its arrival.
    """
    caller, history = context.caller, serving.engine.history
    records = [record for record in history.find(name) if caller.operator or record.tenant == caller.tenant]
    if not records:
        raise RequestNotFoundError(f"there is no live or recent request {name!r} here", "id")
    return {"requests": [_account(history, record) for record in records]}


def _account(history: History, record: RequestRecord) -> RequestAccount:
    first, end = record.first_token, record.ended
    return {
        "id": record.request_id,
        "state": "open" if end is None else "ended",
        "prompt_tokens": record.prompt_tokens,
        "priority": record.priority,
        "tenant": record.tenant,
        "seconds_to_first_token": None if first is None else round(first - record.arrival, 6),
        "seconds": None if end is None else round(end - record.arrival, 6),
        "finish_reasons": record.finish_reasons,
        "events": history.explain(record),
    }


@router.get("/debug/timeline", response_class=Response, responses={"default": ERRORS["default"]})
async def timeline(
    context: ContextOf, serving: ServingOf, seconds: Annotated[float, Query(gt=0, le=600)] = 60.0
) -> Response:
    """The steps of the last seconds as a trace for ui.perfetto.dev or chrome://tracing. For operators only."""
    if not context.caller.operator:
        raise NotPermittedError("the timeline shows every key's requests: it needs an operator's API key")
    history = serving.engine.history
    steps, records = history.steps(seconds), history.records()
    body = await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(steps, records)))
    return Response(body, media_type="application/json")
