"""Who is behind: a reader that is busy elsewhere, not one that the event loop did not wake yet."""

import asyncio
from collections.abc import Iterable

import pytest

from penstock.api.request import FinishReason, Request, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import SamplingParams
from penstock.errors import SlowReaderError
from penstock.frontend.open_requests import single_tokens
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.frontend.request_stream import RequestStream
from tests.support.params import NEUTRAL

MOST = 5


def stream(num_requests: int) -> tuple[list[OutputProcessor], RequestStream]:
    output_processors = [
        OutputProcessor(Request(name, (7, 8), NEUTRAL, arrival=0.0), SamplingParams(), None, None)
        for name in map(str, range(num_requests))
    ]
    return output_processors, RequestStream(lambda *_: None, output_processors, True, MOST)


def deliver(output_processors: list[OutputProcessor], request_stream: RequestStream, tokens: Iterable[int]) -> None:
    for token in tokens:
        for position, output_processor in enumerate(output_processors):
            delta = output_processor.process_output(SequenceOutput(str(position), 0, [token]), 0.0)
            request_stream.deliver(position, delta, is_last=False)


def read(deltas: list[tuple[int, CompletionDelta]], position: int) -> list[int]:
    return [token for at, delta in deltas if at == position for token in delta.token_ids]


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_reader_may_be_busy_while_so_many_tokens_come_for_each_sequence_and_no_more(num_requests):
    async def talk():
        output_processors, request_stream = stream(num_requests)
        deliver(output_processors, request_stream, range(MOST))
        assert read(await anext(request_stream), num_requests - 1) == list(range(MOST))
        deliver(output_processors, request_stream, range(MOST + 1))
        with pytest.raises(SlowReaderError):
            await anext(request_stream)

    asyncio.run(talk())


def test_an_output_of_several_tokens_is_told_token_by_token():
    logprobs = [TokenLogprob(token, -1.0) for token in (5, 6, 7)]
    whole = SequenceOutput("a", 1, [5, 6, 7], logprobs, FinishReason.STOP, first_scheduled=2.0, num_cached_tokens=4)
    assert single_tokens(whole) == [
        SequenceOutput("a", 1, [5], logprobs[:1], first_scheduled=2.0, num_cached_tokens=4),
        SequenceOutput("a", 1, [6], logprobs[1:2]),
        SequenceOutput("a", 1, [7], logprobs[2:], FinishReason.STOP),
    ]
    for short in (SequenceOutput("a", 0, []), SequenceOutput("a", 0, [5], finish_reason=FinishReason.LENGTH)):
        assert single_tokens(short) == [short]


def test_a_reader_that_waits_is_not_behind_however_much_comes_before_it_is_woken():
    async def talk():
        output_processors, request_stream = stream(1)
        waiting = asyncio.ensure_future(anext(request_stream))
        await asyncio.sleep(0)
        deliver(output_processors, request_stream, range(10 * MOST))
        assert read(await waiting, 0) == list(range(10 * MOST))
        deliver(output_processors, request_stream, range(MOST + 1))
        with pytest.raises(SlowReaderError):  # now it was not waiting
            await anext(request_stream)

    asyncio.run(talk())
