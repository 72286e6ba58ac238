"""Checks the grammars of calls before they are accepted: one at a time, round-robin between tenants.

    check(structured, tenant) ──turn──> GrammarValidator.submit ──> a worker process

A check waits for as long as its caller does. One that has begun is completed, within the worker's processor time.
"""

import asyncio

from penstock.api.sampling_params import Structured
from penstock.core.turns import Turns
from penstock.errors import InvalidRequestError, OverloadedError, PenstockError, ShuttingDownError
from penstock.frontend.limits import SharedLimit
from penstock.structured.form_limits import check_size
from penstock.structured.grammar_validator import GrammarValidator

MAX_WAITING_CHARACTERS = 2**23


class GrammarChecks:
    """The queue of checks of one event loop, and the validator that executes them."""

    def __init__(self, validator: GrammarValidator, max_characters: int = MAX_WAITING_CHARACTERS) -> None:
        """
        Args:
            max_characters: of all waiting schemas and grammars together.
        """
        self._validator = validator
        self._room = SharedLimit(max_characters)
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self._is_busy = False
        self._is_closed = False

    async def check(self, structured: Structured, tenant: str) -> None:
        """
        Raises:
            InvalidRequestError: the grammar does not compile, and the message says why.
            OverloadedError: too many characters wait, or the server is shutting down.
            EngineError: there is no process to check it.
        """
        if not self._validator.knows(structured):
            check_size(structured)
            await self._turn(structured, tenant)
            loop = asyncio.get_running_loop()
            # Released when the check ends, not when the caller is cancelled: the worker continues.
            self._validator.submit(structured).add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        found = asyncio.wrap_future(self._validator.submit(structured))
        # read even if the caller has left by then: asyncio logs unread errors with their tracebacks
        found.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(found)
        except InvalidRequestError as error:  # kept for later callers, whose dialects may name another field
            raise InvalidRequestError(str(error), error.param) from None

    async def _turn(self, structured: Structured, tenant: str) -> None:
        if self._is_closed:
            raise _shutting_down()
        size = structured.num_characters
        if not self._room.fits(size, tenant):
            raise OverloadedError(
                f"{self._room.held} characters of schemas and grammars wait to be checked, of at most "
                f"{self._room.most}, of which one API key may not take all"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Only while it waits: one check runs at a time, whatever its size.
        self._room.take(size, tenant)
        self._waiting.add(tenant, turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # its turn had already come
                self._leave()
            raise
        finally:
            self._room.take(-size, tenant)

    def _admit(self) -> None:
        while not self._is_busy and (turn := self._waiting.take_first()) is not None:
            if not turn.cancelled():
                self._is_busy = True
                turn.set_result(None)

    def _leave(self) -> None:
        self._is_busy = False
        self._admit()

    async def close(self) -> None:
        """Refuse the waiting checks, and kill the worker, even while it compiles."""
        self._is_closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(_shutting_down())
        self._waiting.clear()
        await asyncio.to_thread(self._validator.close)


def _shutting_down() -> PenstockError:
    return ShuttingDownError("the server is shutting down")
