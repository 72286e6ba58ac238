"""A block that ends when the client of its call disconnects."""

import asyncio

import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, field_validator

from penstock.errors import ClientGoneError
from penstock.frontend.large_work import MAX_BYTES, LargeWork
from penstock.server.body_route import LARGE_BODY, BodyRoute
from penstock.server.disconnect import cancelled_on_disconnect


def client(leaves: asyncio.Event):
    async def receive():
        await leaves.wait()
        return {"type": "http.disconnect"}

    return receive


async def hold(receive):
    with cancelled_on_disconnect(receive):
        await asyncio.sleep(60)


def test_a_block_ends_with_its_client():
    async def talk():
        leaves = asyncio.Event()
        call = asyncio.ensure_future(hold(client(leaves)))
        await asyncio.sleep(0.01)
        assert not call.done()
        leaves.set()
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(call, 10)

    asyncio.run(talk())


def test_blocks_within_each_other_end_once():
    async def nested(receive):
        with cancelled_on_disconnect(receive):
            await hold(receive)

    async def talk():
        leaves = asyncio.Event()
        leaves.set()
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(nested(client(leaves)), 10)

    asyncio.run(talk())


def test_a_client_that_stays_ends_nothing():
    async def talk():
        with cancelled_on_disconnect(client(asyncio.Event())):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(talk()) == "done"


def test_another_cancellation_stays_one():
    async def talk():
        call = asyncio.ensure_future(hold(client(asyncio.Event())))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(talk())


def test_a_large_body_whose_client_has_left_is_not_validated():
    router = APIRouter(route_class=BodyRoute)
    validated = []

    class Content(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def _note(cls, text: str) -> str:
            validated.append(text)
            return text

    @router.post("/")
    async def answer(body: Content) -> None:
        pass

    async def talk():
        app, leaves = FastAPI(), asyncio.Event()
        app.state.large_work = work = LargeWork()
        app.include_router(router)
        content = [{"type": "http.request", "body": b'{"text": "' + b"x" * LARGE_BODY + b'"}'}]
        gone = client(leaves)

        async def receive():
            return content.pop() if content else await gone()

        async def send(message):
            pass

        size = MAX_BYTES // 2
        while size >= LARGE_BODY:  # others' work leaves no room
            await work._enter(size)
            size //= 2
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        call = asyncio.ensure_future(app(scope | {"http_version": "1.1"}, receive, send))
        await asyncio.sleep(0.05)
        assert not call.done()
        leaves.set()
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(call, 10)
        work.close()

    asyncio.run(talk())
    assert not validated
