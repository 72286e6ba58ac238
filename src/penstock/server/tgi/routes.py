"""TGI's dialect: generate, tokenize, info, and SageMaker's invocations. `/v1/*` is OpenAI's."""

import functools
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from penstock import __version__
from penstock.api.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from penstock.checkpoint.encoder_config import Task
from penstock.errors import InvalidRequestError
from penstock.frontend.input_processor import ImagePrompt
from penstock.server.body import check_text, renamed_params
from penstock.server.body_route import BodyRoute
from penstock.server.dialect import Call, CallOf
from penstock.server.huggingface_errors import ERRORS
from penstock.server.openai.body_to_params import conversation
from penstock.server.openai.routes import chat_completions, completions
from penstock.server.openai.schema import ChatBody, ChatCompletion, Completion, CompletionBody
from penstock.server.streams import EVENTS
from penstock.server.tei.routes import EmbedBody, Rank, TeiRerankBody, embed, encoder_info, rerank
from penstock.server.tgi.answers import GenerateAnswer, Question
from penstock.server.tgi.inputs import split_images
from penstock.server.tgi.schema import (
    ChatTokenizeBody,
    ChatTokenized,
    GenerateBody,
    Generated,
    Info,
    Invocation,
    RootBody,
    SimpleToken,
    TokenizeBody,
)
from penstock.server.tgi.validation import check_length, check_stream, is_sampled, sampling_params
from penstock.text.content import take_images

if TYPE_CHECKING:
    from penstock.frontend.images.reader import Picture

router = APIRouter(tags=["TGI"], route_class=BodyRoute)

_PIPELINES: dict[Task, str] = {
    "generate": "text-generation",
    "embed": "feature-extraction",
    "score": "text-ranking",
}
LONGEST_TEXT = 2**20
"""Maximum characters of a text for `/tokenize`."""
_PIECE = 4096


def _answers(model: Any, content: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "content": content or {}}, **ERRORS}


@router.post("/generate", response_class=Response, responses=_answers(Generated))
async def generate(body: GenerateBody, call: CallOf) -> Response:
    """Continue a text."""
    return await _generate(body, call, stream=False)


@router.post("/generate_stream", response_class=Response, responses={200: {"content": EVENTS}, **ERRORS})
async def generate_stream(body: GenerateBody, call: CallOf) -> Response:
    """Continue a text, streamed token by token."""
    return await _generate(body, call, stream=True)


@router.post("/", response_class=Response, responses=_answers(list[Generated] | list[list[float]] | list[Rank], EVENTS))
async def compat_generate(body: RootBody, call: CallOf) -> Response:
    """Continue a text, streamed if `stream` is set; otherwise the answer is a list of one.

    Of a model that embeds or scores: TEI's `/embed` or `/rerank`.
    """
    if isinstance(body, TeiRerankBody):
        return await rerank(body, call)
    if isinstance(body, EmbedBody):
        return await embed(body, call)
    if call.engine.info.encoder is not None and body.model_fields_set == {"inputs"}:
        return await embed(EmbedBody.model_validate({"inputs": body.inputs}), call)
    return await _generate(body, call, stream=bool(body.stream), as_list=True)


@router.post(
    "/invocations",
    response_class=Response,
    responses=_answers(Generated | list[Generated] | ChatCompletion | Completion, EVENTS),
)
async def invocations(body: Invocation, call: CallOf) -> Response:
    """SageMaker's only route: a generation, chat or completion, depending on the body's fields."""
    if isinstance(body, ChatBody):
        return await chat_completions(body, call)
    if isinstance(body, CompletionBody):
        return await completions(body, call)
    return await _generate(body, call, stream=bool(body.stream), as_list=True)


@router.post("/tokenize", response_class=Response, responses={200: {"model": list[SimpleToken]}, **ERRORS})
async def tokenize(body: TokenizeBody, call: CallOf) -> Response:
    """Tokenise a text; returns tokens with their positions."""
    text = check_text(body.inputs, "inputs")
    parts = await call.off_loop_if_large(lambda: split_images(text, call.engine.takes_images))
    pictures = await call.read_images([part for part in parts if not isinstance(part, str)], wants_pixels=False)
    if pictures:
        assert call.engine.images is not None
        images = call.engine.images.tokens
        text = images.with_placeholders(images.bare_prompt(parts, "inputs"))
    tokens = await _tokens(call, text, "inputs", add_special_tokens=True, pictures=pictures)
    return Response(tokens, media_type="application/json")


@router.post("/chat_tokenize", response_class=Response, responses={200: {"model": ChatTokenized}, **ERRORS})
async def chat_tokenize(body: ChatTokenizeBody, call: CallOf) -> Response:
    """Render a conversation with the chat template, and tokenise it."""
    call.choose_model(body.model)
    asked = await call.off_loop_if_large(functools.partial(conversation, body, call.chat_format))
    messages, tools = asked.template_input(call.chat_format)
    messages, sources = take_images(messages)
    pictures = await call.read_images(sources, wants_pixels=False)
    with call.connected():
        text = await call.render(messages, pictures, tools, asked)
    check_text(text, "messages")
    tokens = await _tokens(call, text, "messages", add_special_tokens=False, pictures=pictures)
    answer = {"tokenize_response": msgspec.Raw(tokens), "templated_text": text}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _tokens(
    call: Call, text: str, field: str, *, add_special_tokens: bool, pictures: "Sequence[Picture]"
) -> bytes:
    """A list of `SimpleToken`s as JSON, built in pieces off the event loop, as there may be a million."""
    if len(text) > LONGEST_TEXT:
        raise InvalidRequestError(f"the text has {len(text)} characters; at most {LONGEST_TEXT} are tokenized", field)

    tokenizer, images = call.engine.prompts.need_tokenizer(), call.engine.images

    def encode() -> bytes:
        spans = tokenizer.encode_with_offsets(text, add_special_tokens)
        if pictures:
            assert images is not None
            spans = images.tokens.expand_spans(spans, pictures, field)
        pieces = []
        for start in range(0, len(spans), _PIECE):
            tokens: list[SimpleToken] = [
                {"id": token_id, "text": text[first:stop], "start": first, "stop": stop}
                for token_id, first, stop in spans[start : start + _PIECE]
            ]
            pieces.append(msgspec.json.encode(tokens)[1:-1])
        return b"[" + b",".join(pieces) + b"]"

    return await call.run_off_loop(len(text), encode)


@router.get("/info")
async def info(call: CallOf) -> Info:
    """The model and the server's limits."""
    engine = call.engine.info
    encoder = engine.encoder
    facts: Info = {
        "model_id": call.shown_name,
        "model_sha": None,
        "model_pipeline_tag": _PIPELINES["generate" if encoder is None else encoder.task],
        "max_best_of": MAX_N,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_top_n_tokens": MAX_LOGPROBS,
        "max_input_tokens": engine.max_model_len - 1,
        "max_total_tokens": engine.max_model_len,
        "max_batch_total_tokens": engine.max_batch_total_tokens,
        "router": "penstock",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    return facts if encoder is None else {**facts, **encoder_info(call)}


async def _prompt(call: Call, inputs: str) -> ImagePrompt:
    """The prompt of inputs, with the images in them."""
    prompts = call.engine.prompts
    parts = await call.off_loop_if_large(lambda: split_images(inputs, call.engine.takes_images))
    with call.connected():
        if len(parts) == 1:
            return ImagePrompt(await prompts.encode(inputs, call.tenant))
        assert call.engine.images is not None
        pictures = await call.read_images([part for part in parts if not isinstance(part, str)])
        return await call.engine.images.bare_prompt(
            parts, pictures, lambda text: prompts.encode(text, call.tenant), "inputs"
        )


async def _generate(body: GenerateBody, call: Call, *, stream: bool, as_list: bool = False) -> Response:
    received, given, facts = time.monotonic(), body.parameters, call.engine.info
    if stream:
        check_stream(given)
    params = sampling_params(body.inputs, given, facts)
    if given.adapter_id is not None:
        call.choose_adapter(given.adapter_id)
    tokenizer = call.engine.prompts.need_tokenizer()
    prompt = await _prompt(call, check_text(body.inputs, "inputs"))
    token_ids = prompt.token_ids
    if given.truncate and len(token_ids) > given.truncate:
        if prompt.images:
            raise InvalidRequestError("truncate would cut an input with images: leave it out", "truncate")
        token_ids = token_ids[-given.truncate :]
    check_length(len(token_ids), given.max_new_tokens, facts, refuse_long=call.engine.refuses_long_max_tokens)
    with renamed_params({"structured": "grammar"}):
        accepted = await call.accept_prompt(
            token_ids, params, request_id=f"tgi-{uuid.uuid4().hex}", prompt=body.inputs, images=prompt.images
        )
    question = Question(
        inputs=body.inputs,
        token_ids=token_ids,
        full_text=bool(given.return_full_text),
        details=given.details or given.decoder_input_details,
        seed=accepted.request.params.seed if is_sampled(given) else None,
        is_structured=given.grammar is not None,
        top_tokens=bool(given.top_n_tokens),
        received=received,
        accepted=time.monotonic(),
        device=facts.device,
    )
    return await call.answer([accepted], GenerateAnswer(question, tokenizer, as_list=as_list), stream=stream)
