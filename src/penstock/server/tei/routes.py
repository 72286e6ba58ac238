"""TEI's dialect: embed and rerank. Errors have TGI's shape; `/info` is TGI's, with TEI's fields in it."""

import uuid
from typing import Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import NotRequired, TypedDict

from penstock.frontend.text_encoding import Side, check_dimensions, vector_of
from penstock.server.body import Body, Many
from penstock.server.body_route import BodyRoute
from penstock.server.dialect import Call, CallOf
from penstock.server.encoding import (
    MAX_INPUTS,
    TokenIds,
    check_count,
    encode_inputs,
    json_response,
    listed_inputs,
    ranking,
    score_pairs,
)
from penstock.server.huggingface_errors import ERRORS

router = APIRouter(tags=["TEI"], route_class=BodyRoute)


class _Truncated(Body):
    truncate: bool | None = Field(None, description="Truncate texts that are too long instead of refusing them.")
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None

    @property
    def side(self) -> Side | None:
        """The side on which texts are truncated; None: they are not."""
        if not self.truncate:
            return None
        return "left" if self.truncation_direction in ("Left", "left") else "right"


class EmbedBody(_Truncated):
    """The body of `POST /embed`."""

    inputs: str | Many[str] | TokenIds | Many[TokenIds]
    normalize: bool | None = Field(None, description="Scale vectors to length 1; default: true.")
    prompt_name: str | None = Field(
        None, description="Name of one of the checkpoint's prompts, which is prepended to each text."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Length of the vectors: keeps the first elements, for models trained for that (Matryoshka).",
    )


class TeiRerankBody(_Truncated):
    """The body of `POST /rerank`."""

    query: str
    texts: Many[str]
    raw_scores: bool = Field(False, description="Return logits, without the sigmoid.")
    return_text: bool = False


class Rank(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


@router.post("/embed", response_class=Response, responses={200: {"model": list[list[float]]}, **ERRORS})
async def embed(body: EmbedBody, call: CallOf) -> Response:
    """Embed texts."""
    texts = call.engine.texts
    texts.check_task("embed")
    config = texts.config
    check_dimensions(body.dimensions, config)
    encoded = await encode_inputs(call, listed_inputs(body.inputs), texts.prompt(body.prompt_name), body.side, "inputs")
    outputs = await call.compute(encoded, request_id=f"tei-{uuid.uuid4().hex}")
    normalize = body.normalize is not False

    def answer() -> bytes:
        made = (vector_of(output, config, dimensions=body.dimensions, normalize=normalize) for output in outputs)
        return msgspec.json.encode([vector.tolist() for vector in made])

    return await json_response(call, answer, len(outputs) * config.vector_size)


@router.post("/rerank", response_class=Response, responses={200: {"model": list[Rank]}, **ERRORS})
async def rerank(body: TeiRerankBody, call: CallOf) -> Response:
    """Rank texts by their relevance to a query, the most relevant first."""
    check_count(len(body.texts), "texts")
    pairs = [(body.query, text) for text in body.texts]
    scores, _ = await score_pairs(call, pairs, body.side, raw=body.raw_scores)
    ranks: list[Rank] = []
    for index in ranking(scores):
        rank: Rank = {"index": index, "score": scores[index]}
        if body.return_text:
            rank["text"] = body.texts[index]
        ranks.append(rank)
    return Response(msgspec.json.encode(ranks), media_type="application/json")


class EmbeddingModel(TypedDict):
    pooling: str


class RerankerModel(TypedDict):
    id2label: dict[str, str]
    label2id: dict[str, str]


class ModelType(TypedDict):
    embedding: NotRequired[EmbeddingModel]
    reranker: NotRequired[RerankerModel]


class EncoderInfo(TypedDict):
    """Fields of `/info` that TEI's clients read."""

    model_dtype: str
    model_type: ModelType
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int


def encoder_info(call: Call) -> EncoderInfo:
    """TEI's fields of `/info` for a model that embeds or scores."""
    config, engine = call.engine.texts.config, call.engine.info
    kind: ModelType = {"embedding": {"pooling": "+".join(config.pooling or ("mean",))}}
    if config.task == "score":
        kind = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": "0"}}}
    return {
        "model_dtype": engine.dtype,
        "model_type": kind,
        "max_input_length": engine.max_model_len,
        "max_batch_tokens": engine.max_num_batched_tokens,
        "max_client_batch_size": MAX_INPUTS,
    }
