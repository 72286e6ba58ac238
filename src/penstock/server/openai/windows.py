"""The windows of a transcript, one after another, as one call.

    Transcription.next ──> the journal has it? ──no──> queue ──> Transcription.answer

A call is accepted with its first window. From then on a full queue and a limit only delay it, and a server that shuts
down takes its other windows. With a journal a window has an id made of its content, so that a call that is sent again,
as after a crash of the server, finds what was computed.
"""

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from penstock.api.request import RequestOutput
from penstock.errors import (
    ClientGoneError,
    EngineError,
    InvalidRequestError,
    LimitError,
    QueueTimeoutError,
    ShuttingDownError,
)
from penstock.frontend.audio.transcription import Question, Segment, Transcription
from penstock.frontend.open_requests import Accepted, Series
from penstock.server.dialect import Call

_POLL_SECONDS = 1.0
"""Longest pause before a window that was refused is tried again."""


async def transcribe_windows(
    call: Call, transcription: Transcription, *, watched: bool
) -> AsyncIterator[list[Segment]]:
    """The segments of each window, as it is transcribed.

    Args:
        watched: see `Call.outputs`.

    Raises:
        LimitError: the first window is refused; or a later one, for as long as a request may wait in the queue.
    """
    with call.engine.open_requests.series() as series:
        while questions := transcription.next():
            outputs = await _ask(call, questions, series, watched=watched)
            made = transcription.answer([output.outputs[0] for output in outputs])
            if made:
                yield made


async def _ask(call: Call, questions: Sequence[Question], series: Series, *, watched: bool) -> list[RequestOutput]:
    """The answers about a window: from the journal, or computed. Those of a series that has begun wait where others are
    refused."""
    name, until = _name(call, questions), time.monotonic() + call.queue_seconds
    accepted = await _accept(call, questions, name or uuid.uuid4().hex)
    while True:
        _check_connected(call)
        try:
            if name is not None:
                try:
                    found = await call.recorded_outputs(accepted, watched=watched)
                except (InvalidRequestError, EngineError):  # it was aborted, or failed
                    name, accepted = None, await _accept(call, questions, uuid.uuid4().hex)
                    continue
                if found is not None:
                    series.may_go_on = True
                    return found
                if call.engine.open_requests.find(accepted[0].request.request_id) is not None:
                    continue  # an equal call has begun it since
            return await call.outputs(accepted, watched=watched, series=series)
        except LimitError as error:
            is_over = isinstance(error, (QueueTimeoutError, ShuttingDownError)) or time.monotonic() > until
            if is_over or not series.may_go_on:
                raise
            pause = min(error.retry_after, _POLL_SECONDS)
        with call.connected() if watched else contextlib.nullcontext():
            await asyncio.sleep(pause)


def _name(call: Call, questions: Sequence[Question]) -> str | None:
    """A key shared only by questions with equal answers; None: their answers are random, or there is no journal."""
    if not call.engine.journaled or any(each.params.temperature and each.params.seed is None for each in questions):
        return None
    about = [(each.prompt, each.params, [image.digest for image in each.images]) for each in questions]
    adapter = None if call.adapter is None else (call.adapter.name, call.adapter.digest)
    content = repr((call.tenant, call.engine.info.model_identity, call.engine.info.arithmetic, adapter, about))
    return hashlib.sha256(content.encode()).hexdigest()


async def _accept(call: Call, questions: Sequence[Question], name: str) -> list[Accepted]:
    return [
        await call.accept_prompt(
            list(question.prompt),
            question.params,
            request_id=f"transcript-{name}-{index}",
            images=question.images,
        )
        for index, question in enumerate(questions)
    ]


def _check_connected(call: Call) -> None:
    if call.is_aborted:  # between two windows no request stream tells
        raise ClientGoneError("the client has gone")
