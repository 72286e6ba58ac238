"""OpenAI's dialect: chat completions, completions and models."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from penstock.engine.client import Accepted, AsyncEngine, Generation
from penstock.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.request import SamplingParams
from penstock.server.errors import ErrorBody, error_body, logger
from penstock.server.openai_answers import Answer, ChatAnswer, CompletionAnswer, Head, usage_of
from penstock.server.openai_schema import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    GenerationBody,
    Message,
    ModelCard,
    ModelList,
)
from penstock.server.sse import DONE, EventStream, event, on_disconnect

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, for /v1/completions only

router = APIRouter(prefix="/v1", tags=["OpenAI"])


class Dialect:
    """What the routes share: the engine, and the name under which its model is served."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self.created = int(time.time())

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ModelNotFoundError(f"the model {name!r} is not served here; {self.model_name!r} is", "model")

    def head(self, prefix: str) -> Head:
        return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self.model_name)


async def _dialect(request: Request) -> Dialect:
    dialect: Dialect = request.app.state.openai
    return dialect


DialectOf = Annotated[Dialect, Depends(_dialect)]

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is refused; `param` names the field at fault."},
    404: {"model": ErrorBody, "description": "The model is not served here."},
    500: {"model": ErrorBody, "description": "The server failed."},
    503: {"model": ErrorBody, "description": "The engine is gone, or the server is shutting down."},
    "default": {"model": ErrorBody, "description": "Any other error."},  # else FastAPI would announce a 422
}


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    stream = {"text/event-stream": {"schema": {"type": "string", "description": "with `stream`: chunks as events"}}}
    return {200: {"model": model, "content": stream}, **_ERRORS}


@router.get("/models")
async def list_models(dialect: DialectOf) -> ModelList:
    """The one model that is served."""
    return {"object": "list", "data": [_card(dialect)]}


@router.get("/models/{name:path}", responses={404: _ERRORS[404], "default": _ERRORS["default"]})
async def retrieve_model(name: str, dialect: DialectOf) -> ModelCard:
    """The model of this name."""
    dialect.check_model(name)
    return _card(dialect)


def _card(dialect: Dialect) -> ModelCard:
    return {
        "id": dialect.model_name,
        "object": "model",
        "created": dialect.created,
        "owned_by": "penstock",
        "max_model_len": dialect.engine.info.max_model_len,
    }


@router.post("/chat/completions", response_class=Response, responses=_answers(ChatCompletion))
async def chat_completions(body: ChatBody, request: Request, dialect: DialectOf) -> Response:
    """Answer a conversation."""
    dialect.check_model(body.model)
    engine, head = dialect.engine, dialect.head("chatcmpl")
    with _in_words_of_chat(body):
        params = _chat_params(body)
        messages = [_message(message, i) for i, message in enumerate(body.messages)]
        token_ids = await engine.encode_chat(messages, **_template_variables(body))
        accepted = engine.accept(token_ids, params, request_id=head.id, priority=body.priority or 0)
    assert engine.tokenizer is not None, "it encoded the messages"
    return await _answer(request, body, engine, [accepted], ChatAnswer(head, engine.tokenizer, _wants_usage(body)))


@router.post("/completions", response_class=Response, responses=_answers(Completion))
async def completions(body: CompletionBody, request: Request, dialect: DialectOf) -> Response:
    """Continue a text, or several."""
    dialect.check_model(body.model)
    params = _completion_params(body)
    engine, head = dialect.engine, dialect.head("cmpl")
    accepted = []
    for position, prompt in enumerate(_prompts(body)):
        text, token_ids = (prompt, await engine.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
        request_id = f"{head.id}-{position}"
        accepted.append(
            engine.accept(token_ids, params, request_id=request_id, prompt=text, priority=body.priority or 0)
        )
    echoed = [_echo(engine, one) for one in accepted] if body.echo else None
    answer = CompletionAnswer(head, engine.tokenizer, _wants_usage(body), params.n, echoed)
    return await _answer(request, body, engine, accepted, answer)


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
    try:
        text.encode()
    except UnicodeEncodeError:
        field = f"messages[{position}].content"
        raise InvalidRequestError(f"{field} holds half of a surrogate pair: it is not text", field) from None
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text} | ({} if message.name is None else {"name": message.name})


def _template_variables(body: ChatBody) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    for name in ("messages", "tools", "add_generation_prompt"):
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


# ── from a generation to an answer ───────────────────────────────────────────────────────────────────────────────────


async def _answer(
    request: Request, body: GenerationBody, engine: AsyncEngine, accepted: Sequence[Accepted], answer: Answer
) -> Response:
    stream = bool(body.stream)
    generation = engine.open(accepted, stream=stream)
    if stream:
        return EventStream(_events(generation, answer, _wants_usage(body)), generation.abort)
    with generation, on_disconnect(request.receive, generation.abort):
        whole = answer.whole(await generation.results())
    return Response(msgspec.json.encode(whole), media_type="application/json")


async def _events(generation: Generation, answer: Answer, with_usage: bool) -> AsyncIterator[bytes]:
    """The stream's events; all that came at one time in one piece. A failure is told as an event, and ends it."""
    pieces: list[bytes] = []
    try:
        async for deltas in generation:
            for position, delta in deltas:
                pieces += map(event, answer.chunks(position, delta))
            if pieces:
                yield b"".join(pieces)
                pieces.clear()
        if with_usage:
            yield event(answer.usage_chunk(usage_of(generation.snapshot())))
        yield DONE
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("a stream failed")
        yield b"".join([*pieces, event(error_body(error))])
