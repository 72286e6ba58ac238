"""OpenAI's dialect: chat completions, completions and models."""

import asyncio
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.open_requests import Accepted
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.conversations import accept_conversation
from penstock.server.dialect import CallOf
from penstock.server.listed import Listed, ListedOf
from penstock.server.openai.answers import ChatAnswer, Head
from penstock.server.openai.body_to_params import (
    chat_param_names,
    chat_params,
    completion_param_names,
    completion_params,
    conversation,
    echoes_logprobs,
    prompts,
    shows_reasoning,
    stream_usage,
)
from penstock.server.openai.completion_answer import CompletionAnswer, Echo, Shown
from penstock.server.openai.schema import ChatBody, ChatCompletion, Completion, CompletionBody, ModelCard, ModelList
from penstock.server.openai_errors import ERRORS, answers_or_errors
from penstock.server.serving import ANY_MODEL, unknown_model

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BodyRoute)


@router.get("/models")
async def list_models(listed: ListedOf) -> ModelList:
    """The names of the models that are served, their states, and their adapters."""
    cards = [card for model in listed for card in _cards(model)]
    first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
    return {"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last}


@router.get("/models/{name:path}", responses={404: ERRORS[404], "default": ERRORS["default"]})
async def retrieve_model(name: str, context: ContextOf, listed: ListedOf) -> ModelCard:
    """The model of this name, or the adapter."""
    cards = [card for model in listed for card in _cards(model)]
    found = [card for card in cards if card["id"] == name] or (cards[:1] if name in ANY_MODEL else [])
    if not found:
        context.caller.check_model(name)
        raise unknown_model(name, [own for model in listed for own in model.names])
    return found[0]


def _cards(model: Listed) -> Iterator[ModelCard]:
    for name in model.names:
        yield _card(model, name)
    for adapter in model.adapters:
        yield {**_card(model, adapter.name), "root": adapter.path, "parent": model.shown_name}


def _card(model: Listed, name: str) -> ModelCard:
    info = None if model.serving is None else model.serving.engine.info
    status = model.status
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "max_model_len": None if info is None else info.max_model_len,
        "type": "model",
        "display_name": name,
        "root": model.path,
        "parent": None,
        "capabilities": [] if model.serving is None else _capabilities(model.serving.engine),
        "created_at": datetime.fromtimestamp(model.created, timezone.utc).isoformat().replace("+00:00", "Z"),
        "status": {
            "value": status.state,
            "progress": round(status.progress, 3),
            "stage": status.stage,
            "error": status.error,
        },
    }


def _capabilities(engine: AsyncEngine) -> list[str]:
    encoder = engine.info.encoder
    if encoder is not None:
        return ["embedding" if encoder.task == "embed" else "rerank"]
    if engine.info.audio_input is not None:
        return ["transcription"]
    able = {"completion": True, "vision": engine.takes_images, "audio": engine.takes_sounds}
    return [name for name, is_able in able.items() if is_able]


@router.post("/chat/completions", response_class=Response, responses=answers_or_errors(ChatCompletion))
async def chat_completions(body: ChatBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.choose_model(body.model)
    head = Head.new("chatcmpl-", call.model_name)
    with chat_param_names(body):
        accepted, parsers = await accept_conversation(
            call, partial(conversation, body), chat_params(body), request_id=head.id, priority=body.priority
        )
        usage = stream_usage(body, [accepted.request.prompt_token_ids])
        tokenizer = call.engine.prompts.need_tokenizer()
        answer = ChatAnswer(head, tokenizer, parsers, usage, show_reasoning=shows_reasoning(body))
        return await call.answer([accepted], answer, stream=bool(body.stream))


@router.post("/completions", response_class=Response, responses=answers_or_errors(Completion))
async def completions(body: CompletionBody, call: CallOf) -> Response:
    """Continue a text, or several."""
    call.choose_model(body.model)
    engine, head = call.engine, Head.new("cmpl-", call.model_name)
    accepted = []
    with completion_param_names(body):
        params = completion_params(body)
        asked = prompts(body)
        call.check_num_answers(len(asked), params)
        for position, prompt in enumerate(asked):
            await asyncio.sleep(0)  # there may be thousands: others come between them
            with call.connected():
                text, token_ids = (
                    (prompt, await engine.prompts.encode(prompt, call.tenant))
                    if isinstance(prompt, str)
                    else (None, prompt)
                )
            request_id, priority = f"{head.id}-{position}", body.priority
            accepted.append(
                await call.accept_prompt(token_ids, params, request_id=request_id, prompt=text, priority=priority)
            )
        echoed = [_echo(engine, item) for item in accepted] if body.echo else None
        usage = stream_usage(body, [item.request.prompt_token_ids for item in accepted])
        shown = Shown(params.n, usage, echoed, echoes_logprobs(body))
        answer = CompletionAnswer(head, engine.tokenizer, shown)
        return await call.answer(accepted, answer, stream=bool(body.stream))


def _echo(engine: AsyncEngine, accepted: Accepted) -> Echo:
    token_ids = accepted.request.prompt_token_ids
    if accepted.prompt is not None:
        return Echo(accepted.prompt, token_ids)
    if engine.tokenizer is None:
        raise InvalidRequestError("echo needs a tokenizer, and the model came without one", "echo")
    return Echo(engine.tokenizer.decode(list(token_ids)), token_ids)
