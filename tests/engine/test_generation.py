"""Who is behind: a reader that is busy elsewhere, not one that the event loop did not wake yet."""

import asyncio
from collections.abc import Iterable

import pytest

from penstock.engine.assembler import Assembler, CompletionDelta
from penstock.engine.generation import Generation
from penstock.errors import SlowReaderError
from penstock.request import Request, SequenceOutput
from penstock.sampling_params import SamplingParams
from tests.params import NEUTRAL

MOST = 5


def stream(num_requests: int) -> tuple[dict[str, Assembler], Generation]:
    assemblers = {
        name: Assembler(Request(name, (7, 8), NEUTRAL, arrival=0.0), SamplingParams(), None, None)
        for name in map(str, range(num_requests))
    }
    return assemblers, Generation(lambda *_: None, assemblers, True, MOST)


def deliver(assemblers: dict[str, Assembler], generation: Generation, tokens: Iterable[int]) -> None:
    for token in tokens:
        for name, assembler in assemblers.items():
            generation.deliver(name, assembler.feed(SequenceOutput(name, 0, [token]), 0.0))


def read(deltas: list[tuple[int, CompletionDelta]], position: int) -> list[int]:
    return [token for at, delta in deltas if at == position for token in delta.token_ids]


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_reader_may_be_busy_while_so_many_tokens_come_for_each_sequence_and_no_more(num_requests):
    async def talk():
        assemblers, generation = stream(num_requests)
        deliver(assemblers, generation, range(MOST))
        assert read(await anext(generation), num_requests - 1) == list(range(MOST))
        deliver(assemblers, generation, range(MOST + 1))
        with pytest.raises(SlowReaderError):
            await anext(generation)

    asyncio.run(talk())


def test_a_reader_that_waits_is_not_behind_however_much_comes_before_it_is_woken():
    async def talk():
        assemblers, generation = stream(1)
        waiting = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        deliver(assemblers, generation, range(10 * MOST))
        assert read(await waiting, 0) == list(range(10 * MOST))
        deliver(assemblers, generation, range(MOST + 1))
        with pytest.raises(SlowReaderError):  # now it was not waiting
            await anext(generation)

    asyncio.run(talk())
