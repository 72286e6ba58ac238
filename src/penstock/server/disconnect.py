"""Aborts or cancels a call when its client disconnects."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator

from starlette.types import Receive

from penstock.errors import ClientGoneError


@contextlib.contextmanager
def on_disconnect(receive: Receive, abort: Callable[[], None]) -> Iterator[None]:
    """Call `abort` when the client disconnects during the block. The request's body must have been read."""
    watch = asyncio.ensure_future(_wait_for_disconnect(receive, abort))
    try:
        yield
    finally:
        watch.cancel()


async def _wait_for_disconnect(receive: Receive, abort: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    abort()


@contextlib.contextmanager
def cancelled_on_disconnect(receive: Receive) -> Iterator[None]:
    """Cancel the block when the client disconnects. The request's body must have been read.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    try:
        with on_disconnect(receive, leave):
            yield
    except asyncio.CancelledError:
        if is_gone and not _is_cancelled_by_others(task):
            raise ClientGoneError("the client has gone") from None
        raise


def _is_cancelled_by_others(task: "asyncio.Task[object]") -> bool:
    """Undo our own cancellation; whether others remain. Python 3.10 does not count cancellations."""
    return sys.version_info >= (3, 11) and task.uncancel() > 0
