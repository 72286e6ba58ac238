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
    """Whether its form is the grammar of its calls, and no other."""

    async def accept_conversation(self, call: Call, *, request_id: str, priority: int | None) -> Accepted:
        """Check it; nothing runs yet.

        Raises:
            InvalidRequestError: the engine could not serve it.
        """
        with renamed_params({"structured": "tools"} if self.guarded else {}):
            return await call.accept_prompt(self.token_ids, self.params, request_id=request_id, priority=priority)


async def prepare(call: Call, read: Callable[[ChatFormat], Conversation], params: SamplingParams) -> Prepared:
    """Make a conversation's prompt, and settle how its answers are to be read.

    Args:
        read: takes the conversation out of the call's body.

    Raises:
        InvalidRequestError: the chat template refuses it, or tools do not go with the model or with the parameters.
    """
    known, tokenizer = call.chat_format, call.need_tokenizer()
    conversation = await call.off_loop_if_large(functools.partial(read, known))
    tools = conversation.tools
    told = conversation.template_tools(known)
    token_ids = await call.engine.encode_chat(
        conversation.messages, tools=told, prefill=conversation.prefill, **conversation.variables
    )
    guarded = tools.guarded and (params.structured is None or tools.choice == "required")
    params = constrain(params, known, tokenizer, token_ids, tools)
    return Prepared(token_ids, params, Parsers(known, tokenizer, token_ids, tools), guarded)
