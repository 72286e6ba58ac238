"""Converts Ollama's request bodies to sampling parameters and conversations."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.api.sampling_params import SamplingParams, Structured
from penstock.api.tools import NO_TOOLS, Function, Tools, arguments_text, called, template_id
from penstock.errors import InvalidRequestError, PromptTooLongError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.parsers.history import placeholder
from penstock.server.body import check_text, renamed_params
from penstock.server.image_parts import not_supported
from penstock.server.ollama.schema import CallMade, ChatBody, GenerateBody, GenerationBody, Message, Options, Tool
from penstock.text.content import Content, ImageSource, content_of

_DEFAULTS = SamplingParams(temperature=0.8, top_k=40, top_p=0.9)
"""Ollama's defaults, used where neither the checkpoint nor the server sets any."""
_CONTROLS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}
"""The options by their names in `SamplingParams`."""


def param_names(prompt: str) -> contextlib.AbstractContextManager[None]:
    """Let refusals name the fields of a body.

    Args:
        prompt: the field that the prompt comes from.
    """
    options = {name: f"options.{option}" for name, option in _OPTIONS.items()}
    return renamed_params({**options, "prompt": prompt, "structured": "format", "logprobs": "top_logprobs"})


def sampling_params(body: GenerationBody, defaults: SamplingParams, max_model_len: int) -> SamplingParams:
    """
    Args:
        defaults: those of the checkpoint and the server.

    Raises:
        InvalidRequestError: a parameter is out of range, or not supported.
    """
    options = body.options or Options.model_validate({})
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        raise InvalidRequestError(
            f"options.num_ctx is {options.num_ctx}, and this server's context has {max_model_len} tokens: send at "
            "most that, or leave it out",
            "options.num_ctx",
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    open_values = defaults if any(getattr(defaults, name) is not None for name in _CONTROLS) else _DEFAULTS
    top_k = open_values.top_k if options.top_k is None else max(options.top_k, 0)
    num_predict = -1 if options.num_predict is None else options.num_predict
    penalties = _penalties(options, defaults, max_model_len)
    return SamplingParams(
        temperature=open_values.temperature if options.temperature is None else options.temperature,
        top_k=top_k,
        top_p=open_values.top_p if options.top_p is None else options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=penalties.repeat_penalty,
        presence_penalty=penalties.presence_penalty or 0.0,
        frequency_penalty=penalties.frequency_penalty or 0.0,
        seed=None if options.seed == -1 else options.seed,
        max_tokens=None if num_predict < 0 else num_predict,
        stop=options.stop or (),
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        structured=_structured(body.format),
    )


def _structured(form: str | dict[str, Any] | None) -> Structured | None:
    if not form:
        return None
    return Structured.json_object() if isinstance(form, str) else Structured.json_schema(form)


def _penalties(options: Options, defaults: SamplingParams, max_model_len: int) -> Options:
    """The options, without penalties if `repeat_last_n` is 0."""
    window = options.repeat_last_n
    if window is None or window == -1 or window >= max_model_len:
        return options
    if window == 0:
        return options.model_copy(update={"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0})
    repeat_penalty = defaults.repetition_penalty if options.repeat_penalty is None else options.repeat_penalty
    if repeat_penalty not in (None, 1) or options.presence_penalty or options.frequency_penalty:
        raise InvalidRequestError(
            f"options.repeat_last_n: a penalty for the last {window} tokens alone is not supported here, as it counts "
            "the whole context: leave it out, or send -1, or 0 to turn penalties off",
            "options.repeat_last_n",
        )
    return options


def within_context(params: SamplingParams, options: Options | None, num_tokens: int, prompt: str) -> SamplingParams:
    """The parameters, with the answer limited to the context of `num_ctx` tokens.

    Args:
        num_tokens: tokens of the prompt.
        prompt: the field that it comes from.

    Raises:
        PromptTooLongError: the prompt leaves no room in that context.
    """
    if options is None or options.num_ctx is None:
        return params
    num_ctx = options.num_ctx
    left = num_ctx - num_tokens
    if left < 1:
        raise PromptTooLongError(
            f"{prompt} is too long: {num_tokens} tokens, and options.num_ctx is {num_ctx}: raise it, or shorten the "
            "prompt, which is never truncated",
            prompt,
        )
    return replace(params, max_tokens=left if params.max_tokens is None else min(params.max_tokens, left))


def conversation(body: ChatBody, known: ChatFormat) -> Conversation:
    """Convert a chat's body. A last message of the assistant's is the beginning of the answer.

    Raises:
        InvalidRequestError: the model cannot read a message, or `think` asks for reasoning of a model that has none.
    """
    asked_from = 1 + max((i for i, message in enumerate(body.messages) if message.role == "assistant"), default=-1)
    calls = _Calls()
    messages = [
        _message(message, f"messages[{index}]", calls, known, is_history=index < asked_from)
        for index, message in enumerate(body.messages)
    ]
    prefill = ""
    if messages[-1]["role"] == "assistant":
        if messages[-1].keys() != {"role", "content"}:
            raise InvalidRequestError(
                "the last message is the assistant's and has a call or thinking; only text can be continued", "messages"
            )
        prefill = messages.pop()["content"]
    if not messages:
        raise InvalidRequestError("there is no message before the assistant's: add one", "messages")
    variables, ignored = _reasoning(body, known)
    return Conversation(messages, tools_of(body.tools), variables, prefill, ignored)


def prompt_conversation(body: GenerateBody, known: ChatFormat) -> Conversation:
    """The conversation of a prompt. Raises as `conversation`."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = _with_images(body.prompt, body.images, "images", known)
    messages: list[dict[str, Any]] = [*system, {"role": "user", "content": content}]
    variables, ignored = _reasoning(body, known)
    return Conversation(messages, NO_TOOLS, variables, "", ignored)


def tools_of(given: Sequence[Tool] | None) -> Tools:
    """The tools of a body, which the model may call.

    Raises:
        InvalidRequestError: a name or a schema is invalid, or two have one name.
    """
    functions = (tool.function for tool in given or ())
    return Tools(
        tuple(
            Function(function.name, function.description, function.parameters, bool(function.strict))
            for function in functions
        )
    )


def _with_images(text: str, images: Sequence[str] | None, field: str, known: ChatFormat) -> Content:
    """A text after its images, which are in base64.

    Raises:
        InvalidRequestError: there are images, and the model reads text only.
    """
    if images and not known.takes_images:
        raise not_supported("an image", field, known)
    sources = [
        ImageSource(f"{field}[{index}]", data, is_url=data.startswith("data:"))
        for index, data in enumerate(images or ())
    ]
    return content_of([*sources, text], "")


class _Calls:
    """Tool calls of earlier turns without a result yet; a result without an id answers the first call of its tool."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # (id, name)

    def add(self, call: CallMade) -> str:
        """The id of a call, its own or a new one."""
        id = call.id or f"call_{self._count}"
        self._count += 1
        self._open.append((id, call.function.name))
        return id

    def answered(self, message: Message) -> tuple[str, str] | None:
        """Id and name of the call that a result answers; None if there is none."""
        name = message.tool_name
        wanted = [
            call
            for call in self._open
            if (message.tool_call_id in (None, "", call[0]) and (not name or name == call[1]))
        ]
        if not wanted:
            return None
        self._open.remove(wanted[0])
        return wanted[0]


def _message(message: Message, field: str, calls: _Calls, known: ChatFormat, *, is_history: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": _content(message, field, known, is_history=is_history)}
    if message.role == "assistant":
        if message.thinking:
            made["reasoning_content"] = check_text(message.thinking, f"{field}.thinking")
        if message.tool_calls:
            made["tool_calls"] = [_call_made(call, calls, f"{field}.tool_calls") for call in message.tool_calls]
    if message.role == "tool":
        id, name = calls.answered(message) or (message.tool_call_id, message.tool_name)
        if id:
            made["tool_call_id"] = template_id(check_text(id, f"{field}.tool_call_id"))
        if name:
            made["name"] = check_text(name, f"{field}.tool_name")
    return made


def _content(message: Message, field: str, known: ChatFormat, *, is_history: bool) -> Content:
    """A message's text and images; in earlier turns, a placeholder stands for each image that cannot be read."""
    text, images = check_text(message.content, f"{field}.content"), message.images or ()
    may_have_images = message.role in ("user", "tool")
    if is_history and not (known.takes_images and may_have_images):
        return "\n".join([text, *(placeholder("image") for _ in images)])
    if images and not may_have_images:
        raise InvalidRequestError(f"{field}.images goes with the roles user and tool only", f"{field}.images")
    return _with_images(text, images, f"{field}.images", known)


def _call_made(call: CallMade, calls: _Calls, field: str) -> dict[str, Any]:
    given = call.function.arguments
    text = given if isinstance(given, str) else arguments_text(given, field)
    id = calls.add(call)
    for part in (id, call.function.name, text):
        check_text(part, field)
    return called(call.function.name, text, id)


def _reasoning(body: GenerationBody, known: ChatFormat) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables that `think` sets, and its name if it has no effect."""
    think = body.think
    if think is None:
        return {}, ()
    if think is False:
        variables = known.effort("none")
        return variables or {}, ("think",) if variables is None else ()
    if not known.reasons:
        raise InvalidRequestError("think: this model does not reason: leave it out, or send false", "think")
    if think is True:
        return known.effort("on") or {}, ()
    variables = known.effort("high" if think == "max" else think)
    return variables or {}, ("think",) if variables is None else ()
