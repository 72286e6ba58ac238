"""Anthropic's dialect: messages, and the count of their tokens."""

import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from penstock.api.sampling_params import SamplingParams, Structured
from penstock.errors import InvalidRequestError
from penstock.server.anthropic.answers import MessagesAnswer
from penstock.server.anthropic.body_to_params import conversation
from penstock.server.anthropic.errors import ERRORS
from penstock.server.anthropic.schema import CountTokensBody, MessageAnswer, MessagesBody, TokenCount
from penstock.server.body import renamed_params
from penstock.server.body_route import BodyRoute
from penstock.server.conversations import accept_conversation, prepare
from penstock.server.dialect import CallOf
from penstock.server.streams import EVENTS

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=BodyRoute)

_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": MessageAnswer, "content": EVENTS}, **ERRORS}
_NAMES = {"prompt": "messages", "stop": "stop_sequences", "structured": "output_config"}


@router.post("", response_class=Response, responses=_ANSWERS)
async def create_message(body: MessagesBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.choose_model(body.model)
    with renamed_params(_NAMES):
        accepted, parsers = await accept_conversation(
            call,
            partial(conversation, body),
            _params(body),
            request_id=f"msg_{uuid.uuid4().hex}",
            priority=body.priority,
        )
        omitted = body.thinking is not None and body.thinking.display == "omitted"
        answer = MessagesAnswer(call.model_name, accepted.request, parsers, show_thinking=not omitted)
        return await call.answer([accepted], answer, stream=bool(body.stream))


@router.post("/count_tokens", responses=ERRORS)
async def count_tokens(body: CountTokensBody, call: CallOf) -> TokenCount:
    """Number of tokens of a conversation's prompt."""
    call.choose_model(body.model)
    with renamed_params(_NAMES):
        asked = await prepare(call, partial(conversation, body), SamplingParams(), wants_pixels=False)
        return {"input_tokens": len(asked.prompt.token_ids)}


def _params(body: MessagesBody) -> SamplingParams:
    output_format = body.output_config and body.output_config.format
    if output_format is not None and body.output_format is not None:
        raise InvalidRequestError(
            "output_config.format and output_format both define a format: leave one of them out", "output_format"
        )
    output_format = output_format or body.output_format
    return SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
        structured=None if output_format is None else Structured.json_schema(output_format["schema"]),
    )
