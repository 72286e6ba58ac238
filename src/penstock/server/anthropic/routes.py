"""Anthropic's dialect: messages, and the count of their tokens."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from penstock.request import SamplingParams
from penstock.server.anthropic.answers import MessagesAnswer
from penstock.server.anthropic.errors import ERRORS
from penstock.server.anthropic.schema import MessageAnswer, MessagesBody, PromptBody, TextBlock, TokenCount
from penstock.server.body import check_text, in_words
from penstock.server.dialect import Call, CallOf
from penstock.server.sse import EVENTS

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])

_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": MessageAnswer, "content": EVENTS}, **ERRORS}
_NAMES = {"prompt": "messages", "stop": "stop_sequences"}


@router.post("", response_class=Response, responses=_ANSWERS)
async def create_message(body: MessagesBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.check_model(body.model)
    with in_words(_NAMES):
        params = _params(body)
        token_ids = await _encode(body, call)
        answer = MessagesAnswer(call.model_name, len(token_ids))
        accepted = call.accept(token_ids, params, request_id=answer.id, priority=body.priority)
    return await call.answer([accepted], answer, stream=bool(body.stream))


@router.post("/count_tokens", responses=ERRORS)
async def count_tokens(body: PromptBody, call: CallOf) -> TokenCount:
    """How many tokens a conversation's prompt has."""
    call.check_model(body.model)
    with in_words(_NAMES):
        return {"input_tokens": len(await _encode(body, call))}


def _params(body: MessagesBody) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
    )


async def _encode(body: PromptBody, call: Call) -> list[int]:
    """The conversation's prompt; what an assistant's turn at its end says is how the answer begins."""
    turns = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    for place, turn in enumerate(body.messages):
        text = _text(turn.content, f"messages[{place}].content")
        if turns and turns[-1]["role"] == turn.role:
            turns[-1]["content"] += "\n\n" + text
        else:
            turns.append({"role": turn.role, "content": text})
    prefill = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""
    return await call.engine.encode_chat(turns, prefill=prefill)


def _text(content: str | Sequence[TextBlock], field: str) -> str:
    return check_text(content if isinstance(content, str) else "".join(block.text for block in content), field)
