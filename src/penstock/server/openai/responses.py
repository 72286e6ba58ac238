"""OpenAI's Responses, as far as they are text and calls of tools; recent ones are stored."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from penstock.api.tools import Tools
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.server.body import renamed_params
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.conversations import accept_conversation
from penstock.server.dialect import Call, CallOf, ServingOf
from penstock.server.openai.answers import Head
from penstock.server.openai.responses_answer import ResponsesAnswer
from penstock.server.openai.responses_body_to_params import conversation, response_params
from penstock.server.openai.responses_items import OutputItems
from penstock.server.openai.responses_items_schema import Item
from penstock.server.openai.responses_schema import DeletedResponse, InputItemList, ResponseObject, ResponsesBody
from penstock.server.openai.responses_store import (
    input_items,
    list_input,
    recall,
    stored_input,
    stored_response,
    storing,
)
from penstock.server.openai.responses_tools import OfferedTool, offered_tools, tools_of
from penstock.server.openai_errors import ERRORS, answers_or_errors

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BodyRoute)

_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning",
    "structured": "text",
}
_ID = re.compile(r"resp_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A body with the stored responses and items that it refers to."""

    items: list[Item]
    """The conversation: stored items, then the input."""
    num_earlier: int
    """How many of the items were stored."""
    offered: list[OfferedTool]
    tools: Tools
    store: Callable[[ResponseObject], None] | None
    """Stores the response; None: it is not stored."""


@router.post("/responses", response_class=Response, responses=answers_or_errors(ResponseObject))
async def create_response(body: ResponsesBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.choose_model(body.model)
    request = Head.new("resp_", call.model_name)
    head = _resumed_head(call, request)
    with renamed_params(_NAMES):
        asked = await _read(body, call, head.id)
        params = response_params(body, call.chat_format)
        read = partial(conversation, body, asked.items, asked.num_earlier, asked.tools)
        accepted, parsers = await accept_conversation(call, read, params, request_id=request.id, priority=body.priority)
        tokenizer = call.engine.prompts.need_tokenizer()
        output = OutputItems(head.id, {tool.function.name: tool for tool in asked.offered})
        answer = ResponsesAnswer(head, body, accepted.request.params, tokenizer, parsers, output, asked.store)
        before_end = None if asked.store is None else call.engine.journaled_calls.responses_recorded
        return await call.answer([accepted], answer, stream=bool(body.stream), before_end=before_end)


def _resumed_head(call: Call, new: Head) -> Head:
    """The head of an answer; of a resumed stream that of the original answer, so that its ids stay the same."""
    id = call.resumed_call
    return new if id is None or not _ID.fullmatch(id) else replace(new, id=id)


async def _read(body: ResponsesBody, call: Call, response_id: str) -> _Asked:
    """
    Raises:
        ResponseNotFoundError: the body refers to something that is not stored.
        OverloadedError: open calls hold too many bytes of bodies and stored responses.
        InvalidRequestError: the tools contradict each other.
    """
    recent, tenant = call.recent_responses, call.tenant
    recalled = recall(body, recent, tenant)
    call.hold_bytes(recalled.num_bytes)
    stores = body.store is not False and recent.max_bytes > 0
    if body.store and not stores:
        call.ignore("store")

    def read() -> _Asked:
        earlier, new = recalled.earlier_items(), recalled.resolve(input_items(body))
        items, store = [*earlier, *new], None
        if stores:
            store = storing(recent, tenant, body.previous_response_id, stored_input(new, response_id))
        offered = offered_tools(body, items)
        return _Asked(items, len(earlier), offered, tools_of(body, offered), store)

    return await call.off_loop_if_large(read, recalled.num_bytes)


@router.get("/responses/{response_id}", response_class=Response, responses={200: {"model": ResponseObject}, **ERRORS})
async def retrieve_response(response_id: str, context: ContextOf, serving: ServingOf, stream: bool = False) -> Response:
    """A stored response."""
    if stream:
        raise InvalidRequestError("a stored response is not streamed: leave stream out", "stream")
    found = stored_response(serving.recent_responses, context.caller.tenant, response_id)
    return Response(found.response, media_type="application/json")


@router.delete("/responses/{response_id}", responses=ERRORS)
async def delete_response(response_id: str, context: ContextOf, serving: ServingOf) -> DeletedResponse:
    """Delete a stored response. Those that continue it can be retrieved, but not continued."""
    recent, tenant = serving.recent_responses, context.caller.tenant
    stored_response(recent, tenant, response_id)
    recent.delete(tenant, response_id)
    await serving.engine.journaled_calls.responses_recorded()
    return {"id": response_id, "object": "response", "deleted": True}


@router.get(
    "/responses/{response_id}/input_items",
    response_class=Response,
    responses={200: {"model": InputItemList}, **ERRORS},
)
async def list_input_items(
    response_id: str,
    context: ContextOf,
    serving: ServingOf,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The input of a stored response, without that of the responses that it continues."""
    found = stored_response(serving.recent_responses, context.caller.tenant, response_id)
    page = list_input(found, after, limit, newest_first=order == "desc")
    return Response(msgspec.json.encode(page), media_type="application/json")
