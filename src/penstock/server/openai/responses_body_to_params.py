"""Converts bodies of OpenAI's Responses to sampling parameters and conversations."""

from collections.abc import Sequence

from penstock.api.sampling_params import SamplingParams
from penstock.api.tools import Tools, add_names
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.server.body import check_text
from penstock.server.openai.responses_history import messages_of
from penstock.server.openai.responses_items_schema import Item
from penstock.server.openai.responses_schema import LOGPROBS, ResponsesBody
from penstock.server.openai.responses_tools import ignored_tools
from penstock.server.response_format import structured_of_text_format


def response_params(body: ResponsesBody, known: ChatFormat) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: parameters contradict each other, or one is out of range.
    """
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    if wanted and (body.tools or known.thinks):
        raise InvalidRequestError(f"{LOGPROBS!r} in include works only with answers that are text alone", "include")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs or 0 if wanted else None,
        structured=structured_of_text_format(body.text.format) if body.text and body.text.format else None,
    )


def conversation(
    body: ResponsesBody, items: Sequence[Item], num_earlier: int, tools: Tools, known: ChatFormat
) -> Conversation:
    """The conversation of a body.

    Args:
        items: the stored conversation that it continues, and its input.
        num_earlier: number of leading items that come from stored responses.

    Raises:
        InvalidRequestError: the new input is not text, or there is nothing to answer.
    """
    messages = messages_of(items, num_earlier, known)
    if not messages:
        raise InvalidRequestError("input has no text for the model: add a message", "input")
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": check_text(body.instructions, "instructions")})
    add_names(messages)
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = {} if effort is None else known.effort(effort)
    ignored = ["reasoning.effort"] if variables is None else []
    return Conversation(messages, tools, variables or {}, ignored=(*ignored, *_ignored(body, items)))


def _ignored(body: ResponsesBody, items: Sequence[Item]) -> list[str]:
    """Fields whose values have no effect."""
    fields = ignored_tools(body, items)
    if any(name != LOGPROBS for name in body.include or ()):
        fields.append("include")
    if body.truncation == "auto":
        fields.append("truncation")
    return fields
