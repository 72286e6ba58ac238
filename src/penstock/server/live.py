"""`GET /debug/live`: steps, requests and counters as they change, as server-sent events for the page's tab "Live".

Four events a second, whatever the number of steps: each is encoded once, from records that the history keeps anyway.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.errors import NotPermittedError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.history import RequestRecord
from penstock.server.call_context import ContextOf
from penstock.server.dialect import ServingOf
from penstock.server.openai_errors import ERRORS
from penstock.server.streams import EVENTS, EventStream, Frame, event

router = APIRouter(tags=["operation"])

PERIOD = 0.25
"""Seconds between two events."""
FIRST_SECONDS = 30.0
"""Age of the oldest ended requests in the first event."""
MAX_STEPS = 1000
"""Maximum steps in an event; of more, the newest."""
_METRICS = (
    *("running", "waiting", "fleet_queued", "kv_blocks", "prefix_queries", "prefix_hits", "preemptions"),
    *("steps", "prompt_tokens", "generation_tokens", "drafted_tokens", "accepted_tokens"),
)


@router.get(
    "/debug/live",
    response_class=Response,
    responses={200: {"content": EVENTS}, "default": ERRORS["default"]},
)
async def live(request: Request, context: ContextOf, serving: ServingOf) -> Response:
    """Steps, requests and counters as they change, as server-sent events, until the client leaves or the server drains.
    For operators only."""
    if not context.caller.operator:
        raise NotPermittedError("the live view shows every key's requests: it needs an operator's API key")
    models = request.app.state.models
    if models is None:
        feed = LiveFeed(lambda: [serving.engine], lambda: serving.engine.refusal is not None)
    else:
        feed = LiveFeed(
            lambda: models.served.engines or [models.served.main], lambda: models.served.refusal is not None
        )
    return EventStream(feed.events(), Frame.SERVER_SENT_EVENTS, feed.stop, {}, context.send_body)


class LiveFeed:
    """What changed since the last event, for one reader."""

    def __init__(self, engines: Callable[[], Sequence[AsyncEngine]], is_draining: Callable[[], bool]) -> None:
        """
        Args:
            engines: the engine of each model, of which the first has the history of all.
            is_draining: whether the server refuses new requests, which ends the events.
        """
        self._engines = engines
        self._is_draining = is_draining
        engine = engines()[0]
        self._is_stopped = False
        self._at = time.monotonic() - FIRST_SECONDS
        self._num_steps = max(0, engine.history.num_steps - MAX_STEPS)

    async def events(self) -> AsyncIterator[bytes]:
        """An event now, and one each period."""
        while not (self._is_stopped or self._is_draining()):
            yield event(self.changes())
            await asyncio.sleep(PERIOD)

    def stop(self) -> None:
        """End the events."""
        self._is_stopped = True

    def changes(self) -> dict[str, Any]:
        """Steps since the last call, requests that are open or ended since then, and all counters."""
        engines, now = self._engines(), time.monotonic()
        history, info = engines[0].history, engines[0].info
        metrics = [engine.metrics for engine in engines]
        steps = history.newest_steps(min(MAX_STEPS, history.num_steps - self._num_steps))
        requests = list(self._changed(history.records()))
        self._num_steps, self._at = history.num_steps, now
        return {
            "now": now,
            "steps": steps,
            "requests": requests,
            "metrics": {name: _sums([getattr(own, name).values for own in metrics]) for name in _METRICS},
            "engines": [
                {"place": state.replica, "state": state.state} for engine in engines for state in engine.states()
            ],
            "max_num_seqs": info.max_num_seqs,
            "block_size": info.block_size,
        }

    def _changed(self, records: list[RequestRecord]) -> Iterator[RequestRecord]:
        for record in records:
            if record.ended >= self._at if record.ended is not None else self._is_open(record.request_id):
                yield record

    def _is_open(self, request_id: str) -> bool:
        return any(engine.open_requests.find(request_id) is not None for engine in self._engines())


def _sums(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The values of a metric of all models, by its label."""
    total: dict[str, float] = {}
    for counter in values:
        for label, value in counter.items():
            total[label] = total.get(label, 0) + value
    return total
