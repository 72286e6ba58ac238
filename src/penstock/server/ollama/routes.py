"""Ollama's dialect: chats, prompts and embeddings. `library.py` has the routes about models."""

import re
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from penstock.api.sampling_params import SamplingParams
from penstock.errors import InvalidRequestError
from penstock.frontend.input_processor import ImagePrompt, check_generates
from penstock.frontend.text_encoding import check_dimensions, vector_of
from penstock.parsers.conversation import Parsers
from penstock.server.body import check_text, renamed_params
from penstock.server.body_route import BodyRoute
from penstock.server.conversations import prepare
from penstock.server.dialect import Call, CallOf
from penstock.server.encoding import encode_inputs, json_response, listed_inputs, usage_of
from penstock.server.ollama.answers import ChatAnswer, GenerateAnswer, Question, nanoseconds, now
from penstock.server.ollama.body_to_params import (
    conversation,
    param_names,
    prompt_conversation,
    sampling_params,
    within_context,
)
from penstock.server.ollama.errors import ERRORS
from penstock.server.ollama.infill import infill_prompt
from penstock.server.ollama.names import choose_model
from penstock.server.ollama.schema import (
    Chat,
    ChatBody,
    EmbedBody,
    Embedded,
    EmbeddedPrompt,
    EmbeddingsBody,
    GenerateBody,
    Generated,
    GenerationBody,
)
from penstock.server.streams import JSON_LINES

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)

_NOTHING = re.compile(r"0+(\.0+)?[a-zµ]*")
"""A duration of zero, as in `0s`."""


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "content": JSON_LINES}, **ERRORS}


@router.post("/chat", response_class=Response, responses=_answers(Chat))
async def chat(body: ChatBody, call: CallOf) -> Response:
    """Answer a conversation, streamed unless `stream` is false."""
    received, model = time.monotonic(), await _begin(body, call)
    if not body.messages:
        return _loaded(body, model, {"message": {"role": "assistant", "content": ""}})
    with param_names("messages"):
        params = _params(body, call)
        asked = await prepare(call, partial(conversation, body), params)
        params = within_context(asked.params, body.options, len(asked.prompt.token_ids), "messages")
        id = f"chat-{uuid.uuid4().hex}"
        with renamed_params({"structured": "tools"} if asked.enforced else {}):
            accepted = await call.accept_prompt(
                asked.prompt.token_ids, params, request_id=id, images=asked.prompt.images
            )
        tokenizer = call.engine.prompts.need_tokenizer()
        answer = ChatAnswer(Question(id, model, received, tokenizer, asked.parsers))
        return await call.answer([accepted], answer, stream=body.stream)


@router.post("/generate", response_class=Response, responses=_answers(Generated))
async def generate(body: GenerateBody, call: CallOf) -> Response:
    """Answer a prompt, streamed unless `stream` is false: as a user's message, or as it is if `raw` is set."""
    received, model = time.monotonic(), await _begin(body, call)
    if not body.prompt and not body.images:
        return _loaded(body, model, {"response": ""})
    with param_names("prompt"):
        prompt, params, parsers = await _prompt(body, call, _params(body, call))
        params = within_context(params, body.options, len(prompt.token_ids), "prompt")
        id = f"generate-{uuid.uuid4().hex}"
        accepted = await call.accept_prompt(prompt.token_ids, params, request_id=id, images=prompt.images)
        question = Question(id, model, received, call.engine.prompts.need_tokenizer(), parsers)
        answer = GenerateAnswer(question, with_context=not (body.raw or body.images))
        return await call.answer([accepted], answer, stream=body.stream)


async def _begin(body: GenerationBody, call: Call) -> str:
    """Select the model of a call; returns the name that the answer repeats."""
    model = await choose_model(call, body.model)
    check_generates(call.engine.info)
    call.keep_alive(body.keep_alive)
    return model


def _params(body: GenerationBody, call: Call) -> SamplingParams:
    return sampling_params(body, call.engine.sampling_defaults, call.engine.info.max_model_len)


def _loaded(body: GenerationBody, model: str, content: dict[str, Any]) -> Response:
    """The answer to a call without a prompt, which loads or unloads a model."""
    unload = body.keep_alive == 0 or (isinstance(body.keep_alive, str) and _NOTHING.fullmatch(body.keep_alive))
    reason = "unload" if unload else "load"
    line = {"model": model, "created_at": now(), **content, "done": True, "done_reason": reason}
    return Response(msgspec.json.encode(line), media_type="application/json")


async def _prompt(
    body: GenerateBody, call: Call, params: SamplingParams
) -> tuple[ImagePrompt, SamplingParams, Parsers | None]:
    """A prompt, its parameters, and the parsers of its answer, if it has the chat template's form."""
    prompt, tokenizer = check_text(body.prompt, "prompt"), call.engine.prompts.need_tokenizer()
    has_template = tokenizer.has_chat_template or bool(body.system)
    for name in ("system", "context", "think", "images"):
        if getattr(body, name) and (body.raw or body.suffix):
            raise InvalidRequestError(f"{name} does not go with raw or suffix: leave one of them out", name)
    if body.images and (body.context or not has_template):
        raise InvalidRequestError("images do not go with context, and need a chat template: leave them out", "images")
    if body.think and not has_template:
        raise InvalidRequestError("think: this model does not reason: leave it out, or send false", "think")
    if body.suffix:
        suffix = check_text(body.suffix, "suffix")
        token_ids = await call.off_loop_if_large(partial(infill_prompt, tokenizer, prompt, suffix))
        return ImagePrompt(token_ids), params, None
    if body.raw or not has_template:
        with call.connected():
            token_ids = await call.engine.prompts.encode(prompt, call.tenant)
        return ImagePrompt([*(body.context or ()), *token_ids]), params, None
    asked = await prepare(call, partial(prompt_conversation, body), params)
    whole = replace(asked.prompt, token_ids=[*(body.context or ()), *asked.prompt.token_ids])
    return whole, asked.params, asked.parsers


@router.post("/embed", response_class=Response, responses={200: {"model": Embedded}, **ERRORS})
async def embed(body: EmbedBody, call: CallOf) -> Response:
    """Embed texts. The vectors are normalized."""
    received, model = time.monotonic(), await choose_model(call, body.model)
    call.keep_alive(body.keep_alive)
    texts = call.engine.texts
    texts.check_task("embed")
    config = texts.config
    check_dimensions(body.dimensions, config)
    given = listed_inputs(body.input) if body.input else []
    side: Any = "right" if body.truncate else None
    encoded = await encode_inputs(call, given, texts.prompt(None), side) if given else []
    began = time.monotonic()
    outputs = await call.compute(encoded, request_id=f"embed-{uuid.uuid4().hex}") if encoded else []
    normalize = None if config.normalize else True
    vectors = [vector_of(output, config, dimensions=body.dimensions, normalize=normalize) for output in outputs]

    def answer() -> bytes:
        made: Embedded = {
            "model": model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": nanoseconds(time.monotonic() - received),
            "load_duration": nanoseconds(began - received),
            "prompt_eval_count": usage_of(outputs)["prompt_tokens"],
        }
        return msgspec.json.encode(made)

    return await json_response(call, answer, len(outputs) * config.vector_size)


@router.post("/embeddings", response_class=Response, responses={200: {"model": EmbeddedPrompt}, **ERRORS})
async def embeddings(body: EmbeddingsBody, call: CallOf) -> Response:
    """Embed a text, as Ollama did before `/api/embed`: the vector is normalized if the model says so."""
    await choose_model(call, body.model)
    call.keep_alive(body.keep_alive)
    texts = call.engine.texts
    texts.check_task("embed")
    (encoded,) = await encode_inputs(call, [body.prompt], texts.prompt(None), None, param="prompt")
    (output,) = await call.compute([encoded], request_id=f"embed-{uuid.uuid4().hex}")
    made: EmbeddedPrompt = {"embedding": vector_of(output, texts.config).tolist()}
    return Response(msgspec.json.encode(made), media_type="application/json")
