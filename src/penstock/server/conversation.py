"""Conversations of the dialects that chat, on their way to the engine."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from penstock.frontend.client import Accepted
from penstock.parsers.conversation import Conversation, Parsers, constrain
from penstock.parsers.formats import ChatFormat
from penstock.sampling_params import SamplingParams
from penstock.server.body import renamed_params
from penstock.server.dialect import Call


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation that is ready to be answered."""

    token_ids: list[int]
    params: SamplingParams
    parsers: Parsers
    guarded: bool
    """Whether a grammar sees to its calls."""


async def accept_conversation(
    call: Call,
    read: Callable[[ChatFormat], Conversation],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int | None,
) -> tuple[Accepted, Parsers]:
    """Make a conversation's request, and what reads its answers; nothing runs yet.

    Args:
        read: takes the conversation out of the call's body.

    Raises:
        InvalidRequestError: as `prepare`, or the engine could not serve it.
    """
    asked = await prepare(call, read, params)
    with renamed_params({"structured": "tools"} if asked.guarded else {}):
        accepted = await call.accept_prompt(asked.token_ids, asked.params, request_id=request_id, priority=priority)
    return accepted, asked.parsers


async def prepare(call: Call, read: Callable[[ChatFormat], Conversation], params: SamplingParams) -> Prepared:
    """Make a conversation's prompt, and settle how its answers are to be read.

    Args:
        read: takes the conversation out of the call's body.

    Raises:
        InvalidRequestError: the chat template refuses it, or tools do not go with the model or with the parameters.
    """
    known, tokenizer = call.chat_format, call.engine.prompts.need_tokenizer()
    conversation = await call.off_loop_if_large(functools.partial(read, known))
    tools = conversation.tools
    told = conversation.template_tools(known)
    token_ids = await call.engine.prompts.encode_chat(
        conversation.messages, tools=told, prefill=conversation.prefill, **conversation.variables
    )
    params = constrain(params, known, tokenizer, token_ids, tools)
    return Prepared(token_ids, params, Parsers(known, tokenizer, token_ids, tools), guarded=tools.guarded)
