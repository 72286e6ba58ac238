"""OpenAI's dialect: chat completions, completions and models."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from penstock.engine.client import Accepted, AsyncEngine
from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams
from penstock.server.body import check_text
from penstock.server.dialect import Call, CallOf
from penstock.server.openai.answers import ChatAnswer, CompletionAnswer, Head
from penstock.server.openai.errors import ERRORS
from penstock.server.openai.schema import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    GenerationBody,
    Message,
    ModelCard,
    ModelList,
)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, for /v1/completions only

router = APIRouter(prefix="/v1", tags=["OpenAI"])


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    stream = {"text/event-stream": {"schema": {"type": "string", "description": "with `stream`: chunks as events"}}}
    return {200: {"model": model, "content": stream}, **ERRORS}


@router.get("/models")
async def list_models(call: CallOf) -> ModelList:
    """The one model that is served."""
    name = call.model_name
    return {"object": "list", "data": [_card(call)], "has_more": False, "first_id": name, "last_id": name}


@router.get("/models/{name:path}", responses={404: ERRORS[404], "default": ERRORS["default"]})
async def retrieve_model(name: str, call: CallOf) -> ModelCard:
    """The model of this name."""
    call.check_model(name)
    return _card(call)


def _card(call: Call) -> ModelCard:
    return {
        "id": call.model_name,
        "object": "model",
        "created": call.created,
        "owned_by": "penstock",
        "max_model_len": call.engine.info.max_model_len,
        "type": "model",
        "display_name": call.model_name,
        "created_at": datetime.fromtimestamp(call.created, timezone.utc).isoformat().replace("+00:00", "Z"),
    }


@router.post("/chat/completions", response_class=Response, responses=_answers(ChatCompletion))
async def chat_completions(body: ChatBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.check_model(body.model)
    engine, head = call.engine, Head.new("chatcmpl", call.model_name)
    with _in_words_of_chat(body):
        params = _chat_params(body)
        messages = [_message(message, i) for i, message in enumerate(body.messages)]
        token_ids = await engine.encode_chat(messages, **_template_variables(body))
        accepted = call.accept(token_ids, params, request_id=head.id, priority=body.priority)
    assert engine.tokenizer is not None, "it encoded the messages"
    answer = ChatAnswer(head, engine.tokenizer, _wants_usage(body))
    return await call.answer([accepted], answer, stream=bool(body.stream))


@router.post("/completions", response_class=Response, responses=_answers(Completion))
async def completions(body: CompletionBody, call: CallOf) -> Response:
    """Continue a text, or several."""
    call.check_model(body.model)
    params = _completion_params(body)
    engine, head = call.engine, Head.new("cmpl", call.model_name)
    accepted = []
    for position, prompt in enumerate(_prompts(body)):
        text, token_ids = (prompt, await engine.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
        request_id = f"{head.id}-{position}"
        accepted.append(call.accept(token_ids, params, request_id=request_id, prompt=text, priority=body.priority))
    echoed = [_echo(engine, one) for one in accepted] if body.echo else None
    answer = CompletionAnswer(head, engine.tokenizer, _wants_usage(body), params.n, echoed)
    return await call.answer(accepted, answer, stream=bool(body.stream))


# ── from a body to a request ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _in_words_of_chat(body: ChatBody) -> Iterator[None]:
    """Name the field that the caller wrote, where the engine knows it by another name."""
    try:
        yield
    except InvalidRequestError as error:
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        names = {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs"}
        error.param = names.get(error.param or "", error.param)
        raise


def _chat_params(body: ChatBody) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, max_tokens):
        raise InvalidRequestError("max_completion_tokens and max_tokens, its old name, differ", "max_completion_tokens")
    return _params(body, max_tokens, body.top_logprobs or 0 if body.logprobs else None)


def _completion_params(body: CompletionBody) -> SamplingParams:
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


def _wants_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _message(message: Message, position: int) -> dict[str, str]:
    """A message as chat templates know it."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    check_text(text, f"messages[{position}].content")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text} | ({} if message.name is None else {"name": message.name})


def _template_variables(body: ChatBody) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    for name in ("messages", "tools", "add_generation_prompt", "prefill"):
        if name in given:
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
    return given


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is empty: give at least one token", "prompt")
    tokens = [one for one in prompt if isinstance(one, int)]
    return [tokens] if tokens else [one for one in prompt if not isinstance(one, int)]


def _echo(engine: AsyncEngine, accepted: Accepted) -> str:
    if accepted.prompt is not None:
        return accepted.prompt
    if engine.tokenizer is None:
        raise InvalidRequestError("echo needs a tokenizer, and the model came without one", "echo")
    return engine.tokenizer.decode(list(accepted.request.prompt_token_ids))
