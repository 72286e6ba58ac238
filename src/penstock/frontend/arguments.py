"""Normalises arguments of the Python API: prompts, messages, and one value for all prompts or one for each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.api.sampling_params import SamplingParams
from penstock.errors import InvalidRequestError
from penstock.frontend.input_processor import ImagePrompt
from penstock.frontend.text_encoding import Side

Prompt = str | Sequence[int] | Mapping[str, Any] | ImagePrompt
"""Text, token ids, `{"prompt": text, "multi_modal_data": {"image": image}}`, or what `LLM.chat_prompt` returns."""
Message = Mapping[str, Any]


def side_of(truncate: bool) -> Side | None:
    return "right" if truncate else None


def each_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """The parameters of each of `count` prompts."""
    listed: list[SamplingParams | None] = []
    if isinstance(params, Sequence) and not isinstance(params, str):
        listed.extend(params)
    else:
        listed = [params] * count
    if len(listed) != count:
        raise InvalidRequestError(f"{count} prompts, but {len(listed)} sampling parameters", "params")
    for prompt_params in listed:
        check_params(prompt_params)
    return listed


def check_params(params: object) -> None:
    """
    Raises:
        InvalidRequestError: it is neither None nor `SamplingParams`.
    """
    if params is not None and not isinstance(params, SamplingParams):
        hint = ": SamplingParams(**params) makes them of a dict" if isinstance(params, Mapping) else ""
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}{hint}", "params")


def conversations_of(messages: object) -> "list[list[Message]]":
    """One conversation or several, as a list of conversations.

    Raises:
        InvalidRequestError: it is something else.
    """
    listed = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, (str, Mapping)) else None
    if listed is not None and all(isinstance(message, Mapping) for message in listed):
        return [listed]
    conversations = [
        list(messages)
        for messages in listed or ()
        if isinstance(messages, Iterable) and not isinstance(messages, (str, bytes, Mapping))
    ]
    is_whole = listed is not None and len(conversations) == len(listed)
    if not is_whole or not all(isinstance(message, Mapping) for messages in conversations for message in messages):
        raise InvalidRequestError(
            'messages must be a list of messages such as {"role": "user", "content": "hello"}, or a list of such lists',
            "messages",
        )
    return conversations


def each_adapter(adapter: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """The adapter of each of `count` prompts."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise InvalidRequestError(f"{count} prompts, but {len(adapter)} adapters", "adapter")
    return list(adapter)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list; a single text or list of token ids is one prompt. Takes arrays and iterators, too.

    Raises:
        InvalidRequestError: it is something else.
    """
    if isinstance(prompts, (str, ImagePrompt)) or (isinstance(prompts, Mapping) and "prompt" in prompts):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be a text, token ids, or a list of these; not {type(prompts).__name__}", "prompts"
        )
    listed = [plain_prompt(prompt) for prompt in plain_prompt(prompts)]
    return [listed] if listed and isinstance(listed[0], int) else listed


def plain_prompt(prompt: Any) -> Any:
    """Convert an array or scalar of NumPy, pandas or torch to a list or number; anything else is returned unchanged."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt
