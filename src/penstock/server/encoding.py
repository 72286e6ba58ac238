"""Embedding, scoring and ranking for the routes of all dialects: limits on texts, tokenisation, scores."""

import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, cast

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.api.request import RequestOutput
from penstock.errors import InvalidRequestError
from penstock.frontend.scoring import Pair, Scoring
from penstock.frontend.text_encoding import EncodedText, Side
from penstock.server.body import Many
from penstock.server.dialect import Call

MAX_INPUTS = 2048
"""Maximum inputs of one call, as in OpenAI's API."""
_MANY_NUMBERS = 16_384
TokenIds = Many[Annotated[int, Field(ge=0, lt=2**31)]]
Truncate = Annotated[bool, Field(description="Truncate texts that are too long instead of refusing them.")]


class Usage(TypedDict):
    prompt_tokens: int
    total_tokens: int


async def json_response(call: Call, encode: Callable[[], bytes], size: int) -> Response:
    """A response with the bytes from `encode`, which runs off the event loop if it has many numbers (`size`)."""
    made = await call.run_off_loop(size, encode) if size >= _MANY_NUMBERS else encode()
    return Response(made, media_type="application/json")


def listed_inputs(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | Sequence[int]]:
    """The inputs of a call as a list of texts or lists of token ids; a single one becomes a list of one."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [cast("str | Sequence[int]", given)]
    return list(cast("Sequence[str | Sequence[int]]", given))


async def encode_inputs(
    call: Call,
    given: Sequence[str | Sequence[int]],
    prompt: str,
    truncate: Side | None,
    param: str = "input",
) -> list[EncodedText]:
    """Tokenise a call's inputs.

    Raises:
        InvalidRequestError: there are none or too many, or one is invalid.
    """
    check_count(len(given), param)
    call.check_num_answers(len(given))
    texts = call.engine.texts

    def encode() -> list[EncodedText]:
        if all(isinstance(text, str) for text in given):
            return texts.encode(cast("Sequence[str]", given), prompt=prompt, truncate=truncate, param=param)
        return [texts.check_tokens(cast("Sequence[int]", tokens), truncate=truncate, param=param) for tokens in given]

    return await call.off_loop_if_large(encode)


async def score_pairs(
    call: Call, pairs: Sequence[Pair], truncate: Side | None, priority: int | None = None, *, raw: bool = False
) -> tuple[list[float], list[RequestOutput]]:
    """Score pairs; returns the scores and the encoder's outputs. Raises as `Scoring` and `Call.answer` do."""
    if call.engine.texts.config.task == "score":  # an embedding model computes each text once
        call.check_num_answers(len(pairs))
    scoring = await call.off_loop_if_large(lambda: Scoring(call.engine.texts, pairs, truncate))
    outputs = await call.compute(scoring.encoded, request_id=f"score-{uuid.uuid4().hex}", priority=priority)
    return scoring.scores(outputs, raw=raw), outputs


def ranking(scores: Sequence[float]) -> list[int]:
    """Indices by descending score; ties in order of index."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def check_count(count: int, param: str) -> None:
    """
    Raises:
        InvalidRequestError: there are no texts, or too many.
    """
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError(f"{param} must hold from 1 to {MAX_INPUTS} texts, not {count}", param)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Token usage: the computed tokens."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
