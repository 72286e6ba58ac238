"""From OpenAI's bodies to what the engine is asked."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams
from penstock.server.body import check_text
from penstock.server.openai.schema import ChatBody, CompletionBody, GenerationBody, Message

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, for /v1/completions only


@contextlib.contextmanager
def in_words_of_chat(body: ChatBody) -> Iterator[None]:
    """Name the field that the caller wrote, where the engine knows it by another name."""
    try:
        yield
    except InvalidRequestError as error:
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        names = {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs"}
        error.param = names.get(error.param or "", error.param)
        raise


def chat_params(body: ChatBody) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: parameters contradict each other, or one is out of range.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, max_tokens):
        raise InvalidRequestError("max_completion_tokens and max_tokens, its old name, differ", "max_completion_tokens")
    return _params(body, max_tokens, body.top_logprobs or 0 if body.logprobs else None)


def completion_params(body: CompletionBody) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: parameters contradict each other, or one is out of range.
    """
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequestError("best_of is not supported here other than as much as n: leave it out", "best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "echo together with logprobs is not supported here: no log-probabilities are computed for the prompt",
            "echo",
        )
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _params(body, max_tokens, body.logprobs)


def _params(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    return SamplingParams(
        n=body.n or 1,
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % 2**64,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def wants_usage(body: GenerationBody) -> bool:
    """Whether a stream ends with the usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def chat_messages(body: ChatBody) -> list[dict[str, str]]:
    """The conversation as chat templates know it.

    Raises:
        InvalidRequestError: a message is no text.
    """
    return [_message(message, position) for position, message in enumerate(body.messages)]


def _message(message: Message, position: int) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    check_text(text, f"messages[{position}].content")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text} | ({} if message.name is None else {"name": message.name})


def template_variables(body: ChatBody) -> dict[str, Any]:
    """
    Raises:
        InvalidRequestError: one is not the caller's to set.
    """
    given = body.chat_template_kwargs or {}
    for name in ("messages", "tools", "add_generation_prompt", "prefill"):
        if name in given:
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
    return given


def prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """Each prompt, as text or token ids.

    Raises:
        InvalidRequestError: there is none.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is empty: give at least one token", "prompt")
    tokens = [one for one in prompt if isinstance(one, int)]
    return [tokens] if tokens else [one for one in prompt if not isinstance(one, int)]
