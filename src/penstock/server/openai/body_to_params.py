"""Converts OpenAI request bodies to sampling parameters and conversations."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.parsers.tools import Choice, Function, Tools, add_names, arguments_text, called, template_id
from penstock.sampling_params import SamplingParams
from penstock.server.body import check_text, renamed_params
from penstock.server.openai.answers import StreamUsage
from penstock.server.openai.schema import ChatBody, CompletionBody, GenerationBody, Message
from penstock.server.openai.tools_schema import ToolCallMade, ToolChoice, ToolDefinition


def tools_of(given: Sequence[ToolDefinition] | None, choice: str | ToolChoice | None, parallel: bool | None) -> Tools:
    """The tools of a body; `choice` may also be a function's name, as in TGI.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    functions = tuple(
        Function(
            name=one.function.name,
            description=one.function.description,
            parameters=one.function.parameters,
            strict=bool(one.function.strict),
        )
        for one in given or ()
    )
    if isinstance(choice, ToolChoice):
        return _chosen(functions, choice, parallel)
    if choice in (None, "auto", "none", "required"):
        return Tools(functions, cast(Choice, choice or "auto"), parallel=parallel is not False)
    return Tools.forced(functions, choice)


def _chosen(functions: tuple[Function, ...], choice: ToolChoice, parallel: bool | None) -> Tools:
    one, several = choice.function, choice.allowed_tools
    if (choice.type == "function") != (one is not None) or (choice.type == "allowed_tools") != (several is not None):
        raise InvalidRequestError(
            f"tool_choice of type {choice.type!r} must have the field {choice.type!r}, and no other", "tool_choice"
        )
    if one is not None:
        return Tools.forced(functions, one.name)
    assert several is not None
    return allowed(functions, [tool.function.name for tool in several.tools], several.mode, parallel)


def allowed(functions: tuple[Function, ...], names: Sequence[str], mode: Choice, parallel: bool | None) -> Tools:
    """Some of the functions may be called, or must.

    Raises:
        InvalidRequestError: none may, or there is no such function.
    """
    if not names:
        raise InvalidRequestError("tool_choice allows no tools: name at least one", "tool_choice")
    return Tools(functions, mode, tuple(names), parallel is not False)


def calls_made(calls: Sequence[ToolCallMade], field: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn as chat templates know them."""
    made = []
    for call in calls:
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else arguments_text(arguments, field)
        for said in (call.id, call.function.name, text):
            check_text(said, field)
        made.append(called(call.function.name, text, call.id))
    return made


DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, for /v1/completions only


def chat_param_names(body: ChatBody) -> contextlib.AbstractContextManager[None]:
    """Let refusals name the fields of this body."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    names = {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs", "structured": body.structured_field}
    return renamed_params(names)


def completion_param_names(body: CompletionBody) -> contextlib.AbstractContextManager[None]:
    """Let refusals name the fields of this body."""
    return renamed_params({"structured": body.structured_field})


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
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(body, max_tokens, body.logprobs, body.best_of)
    if not echoes_logprobs(body):
        return params
    if body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "echo with logprobs has the prompt's log-probabilities: leave prompt_logprobs out", "prompt_logprobs"
        )
    return replace(params, prompt_logprobs=body.logprobs)


def echoes_logprobs(body: CompletionBody) -> bool:
    """Whether the prompt goes before the answer with its tokens' log-probabilities."""
    return bool(body.echo) and body.logprobs is not None


def _params(
    body: GenerationBody, max_tokens: int | None, logprobs: int | None, best_of: int | None = None
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", "prompt_logprobs")
    params = SamplingParams(
        n=body.n or 1,
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        bad_words=body.bad_words or (),
        bad_token_ids=body.bad_token_ids or (),
        allowed_token_ids=body.allowed_token_ids,
        seed=None if body.seed is None else body.seed % 2**64,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        best_of=best_of,
        num_beams=_num_beams(body),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        structured=body.structured(),
    )
    if body.stream:
        params.check_streamable()
    return params


def _num_beams(body: GenerationBody) -> int:
    if body.use_beam_search is False and (body.num_beams or 1) > 1:
        raise InvalidRequestError(
            "use_beam_search is false, but num_beams is above 1: leave one of them out", "use_beam_search"
        )
    if not body.use_beam_search:
        return body.num_beams or 1
    num_beams = body.num_beams or body.n or 1
    if num_beams == 1:
        raise InvalidRequestError("use_beam_search needs num_beams, or n, above 1", "use_beam_search")
    return num_beams


def stream_usage(body: GenerationBody, prompts: Sequence[Sequence[int]]) -> StreamUsage:
    """How the chunks of a stream report token usage, by the body's `stream_options`."""
    options = body.stream_options
    at_end = options is not None and bool(options.include_usage)
    return StreamUsage(
        at_end=at_end or (body.usage is not None and bool(body.usage.include)),
        in_chunks=options is not None and bool(options.continuous_usage_stats),
        num_prompt_tokens=sum(map(len, prompts)),
    )


def conversation(body: ChatBody, known: ChatFormat) -> Conversation:
    """The conversation of a body: its messages, tools and response format.

    Raises:
        InvalidRequestError: a message is no text, or what is said of tools or reasoning contradicts itself.
    """
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages = [_message(message, f"messages[{position}]") for position, message in enumerate(body.messages)]
    add_names(messages)
    if body.tool_prompt is not None and tools.offered:
        messages[-1]["content"] += "\n---\n" + check_text(body.tool_prompt, "tool_prompt")
    return Conversation(messages, tools, _template_variables(body, known))


def _message(message: Message, field: str) -> dict[str, Any]:
    calls = message.tool_calls or []
    if message.content is None and not calls:
        raise InvalidRequestError(f"{field}.content: this parameter is required", f"{field}.content")
    for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            raise InvalidRequestError(f"{field}.{name} goes with the role {role!r} only", f"{field}.{name}")
    content = message.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": check_text(text, f"{field}.content"),
    }
    if message.name is not None:
        made["name"] = message.name
    if message.reasoning_content:
        made["reasoning_content"] = check_text(message.reasoning_content, f"{field}.reasoning_content")
    if calls:
        made["tool_calls"] = calls_made(calls, f"{field}.tool_calls")
    if message.tool_call_id is not None:
        made["tool_call_id"] = template_id(message.tool_call_id)
    return made


def _template_variables(body: ChatBody, known: ChatFormat) -> dict[str, Any]:
    effort = {} if body.reasoning_effort is None else known.effort(body.reasoning_effort)
    given = body.chat_template_kwargs or {}
    if not effort.keys().isdisjoint(given):
        raise InvalidRequestError(
            "reasoning_effort and chat_template_kwargs set the same variable: leave one of them out", "reasoning_effort"
        )
    for name in ("messages", "tools", "add_generation_prompt", "prefill"):
        if name in given:
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
    return given | effort


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
