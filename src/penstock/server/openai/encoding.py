"""OpenAI's embeddings; rerank as in Cohere's and Jina's APIs, and score as in vLLM's."""

import base64
import time
import uuid
from typing import ClassVar, Literal

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response
from typing_extensions import NotRequired, TypedDict

from penstock.frontend.scoring import paired
from penstock.frontend.text_encoding import check_dimensions, vector_of
from penstock.server.body import Body, IgnoredValues, Many, renamed_params
from penstock.server.body_route import BodyRoute
from penstock.server.dialect import CallOf
from penstock.server.encoding import (
    TokenIds,
    Truncate,
    Usage,
    check_count,
    encode_inputs,
    json_response,
    listed_inputs,
    ranking,
    score_pairs,
    usage_of,
)
from penstock.server.openai.schema import WITHOUT_EFFECT_ANYWHERE
from penstock.server.openai_errors import ERRORS

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BodyRoute)


class EmbeddingsBody(Body):
    """The body of `POST /v1/embeddings`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["Hello", "Good morning"]}]})

    UNSUPPORTED: ClassVar[IgnoredValues] = {"truncate_prompt_tokens": (), "add_special_tokens": (True,)}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT_ANYWHERE

    model: str | None = Field(None, description="Default: the served model.")
    input: str | Many[str] | TokenIds | Many[TokenIds] = Field(description="Texts or token ids; at most 2,048.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32; default: float."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Length of the vectors: keeps the first elements, for models trained for that (Matryoshka).",
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower values are served first.")
    prompt_name: str | None = Field(
        None, description="Name of one of the checkpoint's prompts, which is prepended to each text."
    )
    truncate: Truncate = False


class DocumentBody(Body):
    text: str


class RerankBody(Body):
    """The body of `POST /v1/rerank`."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"max_tokens_per_doc": (), "rank_fields": ([],), "max_chunks_per_doc": ()}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT_ANYWHERE

    model: str | None = None
    query: str
    documents: Many[str | DocumentBody]
    top_n: int | None = Field(None, ge=1, description="Number of results, best first; default: all.")
    return_documents: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower values are served first.")
    truncate: Truncate = False


class ScoreBody(Body):
    """The body of `POST /v1/score`: one text with several, or as many with as many."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"truncate_prompt_tokens": ()}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT_ANYWHERE

    model: str | None = None
    text_1: str | Many[str] = Field(description="The query, or one query per document.")
    text_2: str | Many[str] = Field(description="The document or documents.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower values are served first.")
    truncate: Truncate = False


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Document(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[Document]


class Reranked(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


@router.post("/embeddings", response_class=Response, responses={200: {"model": Embeddings}, **ERRORS})
async def embeddings(body: EmbeddingsBody, call: CallOf) -> Response:
    """Embed texts."""
    call.check_model(body.model)
    texts = call.engine.texts
    texts.check_task("embed")
    config = texts.config
    check_dimensions(body.dimensions, config)
    given = listed_inputs(body.input)
    encoded = await encode_inputs(call, given, texts.prompt(body.prompt_name), "right" if body.truncate else None)
    outputs = await call.compute(encoded, request_id=f"embd-{uuid.uuid4().hex}", priority=body.priority)

    def answer() -> bytes:
        data: list[Embedding] = []
        for index, output in enumerate(outputs):
            vector = vector_of(output, config, dimensions=body.dimensions)
            shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": shown})
        made: Embeddings = {"object": "list", "data": data, "model": call.model_name, "usage": usage_of(outputs)}
        return msgspec.json.encode(made)

    return await json_response(call, answer, len(outputs) * config.vector_size)


@router.post("/rerank", response_class=Response, responses={200: {"model": Reranked}, **ERRORS})
async def rerank(body: RerankBody, call: CallOf) -> Response:
    """Rank documents by their relevance to a query, the most relevant first."""
    call.check_model(body.model)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    check_count(len(documents), "documents")
    pairs = [(body.query, document) for document in documents]
    scores, outputs = await score_pairs(call, pairs, "right" if body.truncate else None, body.priority)
    results: list[Ranked] = []
    for index in ranking(scores)[: body.top_n]:
        ranked: Ranked = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            ranked["document"] = {"text": documents[index]}
        results.append(ranked)
    made: Reranked = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": call.model_name,
        "results": results,
        "usage": usage_of(outputs),
    }
    return Response(msgspec.json.encode(made), media_type="application/json")


@router.post("/score", response_class=Response, responses={200: {"model": Scores}, **ERRORS})
async def score(body: ScoreBody, call: CallOf) -> Response:
    """Score pairs of texts, in their order."""
    call.check_model(body.model)
    pairs = paired(body.text_1, body.text_2, param="text_1")
    check_count(len(pairs), "text_2")
    with renamed_params({"query": "text_1", "documents": "text_2"}):
        scores, outputs = await score_pairs(call, pairs, "right" if body.truncate else None, body.priority)
    made: Scores = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": call.model_name,
        "data": [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)],
        "usage": usage_of(outputs),
    }
    return Response(msgspec.json.encode(made), media_type="application/json")
