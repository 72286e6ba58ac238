"""Cohere's dialect, version 2: rerank. Errors are `{"message": ...}`."""

import uuid
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.server.body import Body, IgnoredValues, Many
from penstock.server.body_route import BodyRoute
from penstock.server.dialect import CallOf
from penstock.server.encoding import check_count, ranking, score_pairs, usage_of
from penstock.server.errors import ErrorReply

router = APIRouter(prefix="/v2", tags=["Cohere"], route_class=BodyRoute)


class ErrorBody(TypedDict):
    message: str


def shape(reply: ErrorReply) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    return reply.status, {"message": reply.message}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is refused; the message names the field at fault."},
    401: {"model": ErrorBody, "description": "No API key, or an unknown one."},
    404: {"model": ErrorBody, "description": "The model is not served here."},
    429: {"model": ErrorBody, "description": "No room now, or the key's allowance is used up."},
    503: {"model": ErrorBody, "description": "The engine is gone, or the server is shutting down."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}


class CohereRerankBody(Body):
    """The body of `POST /v2/rerank`. Long documents are cut, as this dialect defines."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"max_tokens_per_doc": (), "relevant_spans": ()}

    model: str | None = Field(None, description="Default: the served model.")
    query: str
    documents: Many[str]
    top_n: int | None = Field(None, ge=1, description="Number of results, best first; default: all.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower values are served first.")


class Ranked(TypedDict):
    index: int
    relevance_score: float


class Version(TypedDict):
    version: str


class Tokens(TypedDict):
    input_tokens: int


class Meta(TypedDict):
    api_version: Version
    tokens: Tokens


class Reranked(TypedDict):
    id: str
    results: list[Ranked]
    meta: Meta


@router.post("/rerank", response_class=Response, responses={200: {"model": Reranked}, **ERRORS})
async def rerank(body: CohereRerankBody, call: CallOf) -> Response:
    """Rank documents by their relevance to a query, the most relevant first."""
    call.check_model(body.model)
    check_count(len(body.documents), "documents")
    pairs = [(body.query, document) for document in body.documents]
    scores, outputs = await score_pairs(call, pairs, "right", body.priority)
    made: Reranked = {
        "id": str(uuid.uuid4()),
        "results": [{"index": index, "relevance_score": scores[index]} for index in ranking(scores)[: body.top_n]],
        "meta": {
            "api_version": {"version": "2"},
            "tokens": {"input_tokens": usage_of(outputs)["prompt_tokens"]},
        },
    }
    return Response(msgspec.json.encode(made), media_type="application/json")
