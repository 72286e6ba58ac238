"""Large bodies are checked as small ones are, and nobody waits for that."""

import asyncio
import json
import threading

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, field_validator

from penstock.errors import InvalidRequestError
from penstock.frontend.large_work import LargeWork
from penstock.server.body_route import (
    _PIECE,
    LARGE_BODY,
    MAX_CONTAINERS,
    BodyRoute,
    _check_containers,
    _has_long_number,
)

OTHER_WAS_ANSWERED = threading.Event()


class Patient(BaseModel):
    """Takes as long to check as it takes to answer somebody else."""

    text: str
    number: int = 0

    @field_validator("text")
    @classmethod
    def _wait(cls, text: str) -> str:
        assert len(text) < LARGE_BODY or OTHER_WAS_ANSWERED.wait(20)
        return text


router = APIRouter(route_class=BodyRoute)


@router.post("/length")
async def length(body: Patient) -> int:
    return len(body.text)


@router.get("/other")
async def other() -> None:
    OTHER_WAS_ANSWERED.set()


def post_each(*contents, beside=False):
    app = FastAPI()
    app.state.large_work = LargeWork()
    app.include_router(router)

    async def talk():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            headers = {"content-type": "application/json"}
            calls = [http.post("/length", content=content, headers=headers) for content in contents]
            return await asyncio.gather(*calls, *([http.get("/other")] if beside else []))

    return asyncio.run(talk())


def test_others_are_answered_while_a_large_body_is_checked():
    OTHER_WAS_ANSWERED.clear()
    large, _ = post_each(json.dumps({"text": "x" * LARGE_BODY}), beside=True)
    assert (large.status_code, large.json()) == (200, LARGE_BODY)


@pytest.mark.parametrize(
    "mistake", ['{"text": 5%s}', '{"text": "x", "number": "y"%s}', '["x"%s]', '{"text": "x"%s', "%s"]
)
def test_a_large_body_is_refused_as_a_small_one(mistake):
    small, large = post_each(mistake % " ", mistake % (" " * LARGE_BODY))
    assert small.status_code == large.status_code == 422
    told, told_large = (json.dumps(answer.json()) for answer in (small, large))
    if "json_invalid" not in told:  # that one says where
        assert told == told_large


def test_a_body_of_more_lists_and_objects_than_are_taken_is_refused_and_brackets_in_strings_are_not_counted():
    app = FastAPI()
    app.state.large_work = LargeWork(holds_lock=True)
    app.include_router(router)

    async def talk():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            text = json.dumps({"text": '[{\\"' * MAX_CONTAINERS})
            assert (await http.post("/length", content=text)).json() == 4 * MAX_CONTAINERS
            with pytest.raises(InvalidRequestError, match=f"{MAX_CONTAINERS + 1} lists and objects; at most"):
                _check_containers(b'{"text": [' + b"[]," * (MAX_CONTAINERS - 2) + b"[]]}" + b'"["')

    asyncio.run(talk())


@pytest.mark.parametrize("at", [_PIECE - 16, _PIECE - 1, _PIECE, 2 * _PIECE - 8])
def test_a_long_number_is_found_wherever_pieces_of_a_body_end(at):
    body = b"x" * at + b"1234567.123456789" + b"x" * 20
    assert _has_long_number(body)
    assert not _has_long_number(body.replace(b"7.1", b"7x1"))
