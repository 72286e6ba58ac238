"""Conversations of any chat dialect: from a body to the prompt, the parameters and the parsers of the answers."""

import functools
from collections.abc import Callable
from typing import Any

from penstock.api.sampling_params import SamplingParams
from penstock.dataclass import dataclass
from penstock.frontend.input_processor import ImagePrompt, check_generates
from penstock.frontend.open_requests import Accepted
from penstock.parsers.conversation import ChatFormat, Conversation, Parsers, constrain
from penstock.server.body import renamed_params
from penstock.server.dialect import Call
from penstock.text.content import take_images


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared conversation: its prompt, parameters and answer format."""

    prompt: ImagePrompt
    params: SamplingParams
    parsers: Parsers
    enforced: bool
    """Whether the grammar is that of the tools alone, so that errors name `tools`."""


async def accept_conversation(
    call: Call,
    read: Callable[[ChatFormat], Conversation],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int | None,
) -> tuple[Accepted, Parsers]:
    """Validate a conversation's request without running it, and create the parser of its answers.

    Args:
        read: extracts the conversation from the call's body.

    Raises:
        InvalidRequestError: as `prepare`, or the engine could not serve it.
    """
    asked = await prepare(call, read, params)
    with renamed_params({"structured": "tools"} if asked.enforced else {}):
        accepted = await call.accept_prompt(
            asked.prompt.token_ids,
            asked.params,
            request_id=request_id,
            priority=priority,
            images=asked.prompt.images,
        )
    return accepted, asked.parsers


async def prepare(
    call: Call, read: Callable[[ChatFormat], Conversation], params: SamplingParams, *, wants_pixels: bool = True
) -> Prepared:
    """Render a conversation's prompt, and choose the format of its answers.

    Args:
        read: extracts the conversation from the call's body.
        wants_pixels: False: only the prompt's length is of interest, so images are not decoded.

    Raises:
        ClientGoneError: the client has disconnected.
        InvalidRequestError: the chat template rejects it, or tools are incompatible with the model or the parameters.
    """
    check_generates(call.engine.info)
    known, tokenizer = call.chat_format, call.engine.prompts.need_tokenizer()

    def read_input() -> tuple[Conversation, list[dict[str, Any]], list[dict[str, Any]] | None]:
        conversation = read(known)
        return conversation, *conversation.template_input(known)

    conversation, messages, template_tools = await call.off_loop_if_large(read_input)
    tools = conversation.tools
    if conversation.ignored:
        call.ignore(*conversation.ignored)
    messages, sources = take_images(messages) if known.takes_images or known.takes_sounds else (messages, [])
    if sources:
        prompt = await call.encode_images(messages, sources, template_tools, conversation, wants_pixels=wants_pixels)
    else:
        with call.connected():
            prompt = ImagePrompt(
                await call.engine.prompts.encode_chat(
                    messages,
                    template_tools,
                    conversation.variables,
                    prefill=conversation.prefill,
                    tenant=call.tenant,
                )
            )
    token_ids = prompt.token_ids
    enforced = tools.enforced and (params.structured is None or tools.choice == "required")
    with renamed_params({"structured": "tools"} if enforced else {}):
        params = await call.off_loop_if_large(functools.partial(constrain, params, known, tokenizer, token_ids, tools))
    return Prepared(prompt, params, Parsers(known, tokenizer, token_ids, tools), enforced)
