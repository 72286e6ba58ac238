"""Converts OpenAI request bodies to sampling parameters and conversations."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.api.sampling_params import SamplingParams
from penstock.api.tools import NO_TOOLS, Choice, Function, Tools, add_names, arguments_text, called, template_id
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.parsers.history import placeholder
from penstock.server.body import check_text, renamed_params
from penstock.server.image_parts import SOUNDS, image_at_url, not_supported, sound_at_url, sound_in
from penstock.server.openai.answers import StreamUsage
from penstock.server.openai.schema import ChatBody, CompletionBody, ContentPart, GenerationBody, Message
from penstock.server.openai.tools_schema import CalledFunction, ToolChoice, ToolDefinition
from penstock.text.content import Content, ImageSource, content_of, joined


def tools_of(given: Sequence[ToolDefinition] | None, choice: str | ToolChoice | None, parallel: bool | None) -> Tools:
    """The tools of a body; `choice` may also be a function's name, as in TGI, or Mistral's `any`.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    if not given and choice in (None, "auto", "none"):
        return NO_TOOLS
    functions = tuple(
        Function(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in given or ()
    )
    if isinstance(choice, ToolChoice):
        if choice.type in ("function", "allowed_tools"):
            return _chosen(functions, choice, parallel)
        choice = choice.type
    if choice in (None, "auto", "none", "required", "any"):
        word = "required" if choice == "any" else choice or "auto"
        return Tools(functions, cast(Choice, word), parallel=parallel is not False)
    return Tools.forced(functions, choice)


def _chosen(functions: tuple[Function, ...], choice: ToolChoice, parallel: bool | None) -> Tools:
    function, subset = choice.function, choice.allowed_tools
    fields = {"function": function is not None, "allowed_tools": subset is not None}
    if any((choice.type == name) != is_there for name, is_there in fields.items()):
        raise InvalidRequestError(
            f"tool_choice of type {choice.type!r} must have the field {choice.type!r}, and no other", "tool_choice"
        )
    if function is not None:
        return Tools.forced(functions, function.name)
    assert subset is not None
    return allowed(functions, [tool.function.name for tool in subset.tools], subset.mode, parallel)


def allowed(functions: tuple[Function, ...], names: Sequence[str], mode: Choice, parallel: bool | None) -> Tools:
    """Restrict the tools to a subset that may or must be called (`allowed_tools`).

    Raises:
        InvalidRequestError: the subset is empty, or names an unknown function.
    """
    if not names:
        raise InvalidRequestError("tool_choice allows no tools: name at least one", "tool_choice")
    return Tools(functions, mode, tuple(names), parallel is not False)


def calls_made(message: Message, field: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn as chat templates expect them."""
    made = []
    for index, call in enumerate(message.tool_calls or ()):
        function = call.function
        if function is None:
            custom = call.custom
            function = CalledFunction(name=custom.name, arguments={"input": custom.input}) if custom else None
        if function is not None:
            made.append(_call_made(function, call.id or f"call_{index}", field))
    if message.function_call is not None:
        made.append(_call_made(message.function_call, message.function_call.name, field))
    return made


def _call_made(function: CalledFunction, id: str, field: str) -> dict[str, Any]:
    given = function.arguments
    text = given if isinstance(given, str) else arguments_text(given, field)
    for part in (id, function.name, text):
        check_text(part, field)
    return called(function.name, text, id)


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
    """Whether the answer echoes the prompt with its tokens' log-probabilities."""
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
        InvalidRequestError: a message is not text, or the options of tools or reasoning contradict each other.
    """
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    asked_from = 1 + max((i for i, message in enumerate(body.messages) if message.role == "assistant"), default=-1)
    messages = [
        _message(message, f"messages[{index}]", known, is_history=index < asked_from)
        for index, message in enumerate(body.messages)
    ]
    add_names(messages)
    if body.tool_prompt is not None and tools.offered:
        addition = "\n---\n" + check_text(body.tool_prompt, "tool_prompt")
        messages[-1]["content"] = joined(messages[-1]["content"], addition, "")
    variables, ignored = _template_variables(body, known)
    prefill = (
        _take_prefill(body, messages) if body.continue_final_message or body.add_generation_prompt is False else ""
    )
    return Conversation(messages, tools, variables, prefill, ignored)


def _take_prefill(body: ChatBody, messages: list[dict[str, Any]]) -> str:
    """Remove the last message and return its text, if it is the beginning of the answer."""
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            raise InvalidRequestError(
                "add_generation_prompt false goes with continue_final_message: leave it out", "add_generation_prompt"
            )
        return ""
    if body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: leave one of them out",
            "continue_final_message",
        )
    if messages[-1].keys() != {"role", "content"} or messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant's that is only text", "continue_final_message"
        )
    if len(messages) == 1:
        raise InvalidRequestError("there is no message before the assistant's: add one", "messages")
    return cast(str, messages.pop()["content"])


_IMAGES = ("image_url", "input_image", "image")
_ROLES = {"developer": "system", "function": "tool"}


def _message(message: Message, field: str, known: ChatFormat, *, is_history: bool) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role)
    calls = calls_made(message, f"{field}.tool_calls") if message.tool_calls or message.function_call else []
    if message.content is None and role not in ("assistant", "tool"):
        raise InvalidRequestError(f"{field}.content: this parameter is required", f"{field}.content")
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != owner:
            raise InvalidRequestError(f"{field}.{name} goes with the role {owner!r} only", f"{field}.{name}")
    content = _content(
        message.content or "", f"{field}.content", role, known, with_placeholders=is_history or role == "tool"
    )
    made: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        made["name"] = message.name
    if role == "assistant" and message.thoughts:
        made["reasoning_content"] = check_text(message.thoughts, f"{field}.reasoning_content")
    if calls:
        made["tool_calls"] = calls
    if role == "tool" and (id := message.tool_call_id or message.name) is not None:
        made["tool_call_id"] = template_id(id)
    return made


def _content(
    content: str | Sequence[ContentPart], field: str, role: str, known: ChatFormat, *, with_placeholders: bool
) -> Content:
    """A message's content.

    Args:
        with_placeholders: a part that the model cannot read becomes a placeholder, so that a conversation goes on;
            otherwise it is refused.

    Raises:
        InvalidRequestError: a part cannot be read, or is not valid Unicode.
    """
    if isinstance(content, str):
        return check_text(content, field)
    made: list[str | ImageSource] = []
    for index, part in enumerate(content):
        source = _source(part, f"{field}[{index}].{part.type}", known) if role in ("user", "tool") else None
        if source is not None:
            made.append(source)
            continue
        text = part.text if part.text is not None else part.refusal
        if text is None:
            at = f"{field}[{index}]"
            if part.type == "text":
                raise InvalidRequestError(f"{at}.text: this parameter is required", f"{at}.text")
            if not with_placeholders:
                raise not_supported(part.type, f"{at}.{part.type}", known)
            text = placeholder(part.type)
        made.append(check_text(text, field))
    return content_of(made, "\n")


def _source(part: ContentPart, field: str, known: ChatFormat) -> ImageSource | None:
    """A part's image or sound; None: it has none that the model takes."""
    if known.takes_images and part.type in _IMAGES:
        return image_at_url(part.image_url, part.detail, field)
    if known.takes_sounds and part.type in SOUNDS:
        is_url = part.type == "audio_url" or (part.input_audio is None and part.audio_url is not None)
        return sound_at_url(part.audio_url, field) if is_url else sound_in(part.input_audio, field)
    return None


def _template_variables(body: ChatBody, known: ChatFormat) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables, and the fields that set none of them."""
    variables, ignored = dict(body.chat_template_kwargs or {}), []
    for name in ("messages", "tools", "add_generation_prompt", "prefill"):
        if name in variables:
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
    for field, effort in _efforts(body):
        wanted = known.effort(effort)
        if wanted is None:
            ignored.append(field)
            continue
        if any(name in variables and variables[name] != value for name, value in wanted.items()):
            raise InvalidRequestError(
                f"{field} contradicts another field that controls reasoning: leave one of them out", field
            )
        variables |= wanted
    return variables, tuple(ignored)


def _efforts(body: ChatBody) -> Iterator[tuple[str, str]]:
    """(field, effort) of each field that controls reasoning; "on" is any effort."""
    if body.reasoning_effort is not None:
        yield "reasoning_effort", body.reasoning_effort
    if body.reasoning is not None:
        if body.reasoning.effort is not None:
            yield "reasoning.effort", body.reasoning.effort
        elif body.reasoning.enabled is not None:
            yield "reasoning.enabled", "on" if body.reasoning.enabled else "none"
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        yield "thinking", "on" if body.thinking.type == "enabled" else "none"
    if body.enable_thinking is not None:
        yield "enable_thinking", "on" if body.enable_thinking else "none"


def shows_reasoning(body: ChatBody) -> bool:
    """Whether the answer contains the model's reasoning."""
    return body.include_reasoning is not False and not (body.reasoning is not None and body.reasoning.exclude)


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
    tokens = [token for token in prompt if isinstance(token, int)]
    return [tokens] if tokens else [item for item in prompt if not isinstance(item, int)]
