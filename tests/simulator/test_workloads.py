"""Traffic: traces, journals and chats become requests whose tokens stand for what they say."""

import asyncio
import json
import sqlite3
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.api.request import FinishReason, Request, SequenceOutput
from penstock.api.sampling_params import ResolvedParams, SamplingParams
from penstock.errors import ConfigError
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry, Record, row_of
from penstock.simulator.chats import Chats
from penstock.simulator.traces import HASH_BLOCK, read_trace
from penstock.simulator.workload import Arrival, make_tokens


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(timestamp: int, length: int, ids: list[int], answer: int = 3) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": answer, "hash_ids": ids}


def common(a: "array[int]", b: "array[int]") -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_tokens_of_a_key_are_the_same_each_time_and_those_of_another_differ() -> None:
    assert make_tokens(7, 40) == make_tokens(7, 90)[:40]
    assert common(make_tokens(7, 40), make_tokens(8, 40)) == 0
    assert make_tokens(-3, 5) != make_tokens(3, 5)
    assert set(make_tokens(1, 5000, 11)) == set(range(11))
    assert make_tokens(1, 0) == array("i")


def test_prompts_of_a_trace_share_what_their_hash_ids_do(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "trace.jsonl",
        line(27_000, 1200, [1, 2, 3], answer=5),
        line(30_000, 1100, [1, 2, 4]),
        line(30_500, 700, [9, 2]),
        line(31_000, 600, [1]),
    )
    first, second, third, fourth = read_trace(path).arrivals()
    assert [one.time for one in (first, second, third, fourth)] == [0.0, 3.0, 3.5, 4.0]
    assert [len(one.prompt) for one in (first, second, third, fourth)] == [1200, 1100, 700, 600]
    assert len(first.answer) == 5
    assert common(first.prompt, second.prompt) == 2 * HASH_BLOCK
    assert common(first.prompt, third.prompt) == 0  # equal text after another beginning
    assert common(first.prompt, fourth.prompt) == HASH_BLOCK
    assert len({one.name for one in (first, second, third, fourth)}) == 4


def test_images_of_a_trace_are_equal_where_its_tokens_are(tmp_path: Path) -> None:
    def with_image(start: int, *ids: int) -> dict[str, Any]:
        return line(0, 600, [*ids]) | {"images": [{"start": start, "tokens": 64, "height": 512, "width": 256}]}

    path = write_lines(
        tmp_path / "trace.jsonl", with_image(8, 1), with_image(8, 1, 2), with_image(8, 3), with_image(9, 1)
    )
    images = [arrival.images[0] for arrival in read_trace(path).arrivals()]
    assert (images[0].start, images[0].count, images[0].height, images[0].width) == (8, 64, 512, 256)
    assert [image.digest == images[0].digest for image in images] == [True, True, False, False]


def test_a_trace_is_replayed_faster_and_in_part(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", *(line(1000 * second, 10, []) for second in range(5)))
    trace = read_trace(path, speed=4.0, most=3)
    assert [arrival.time for arrival in trace.arrivals()] == [0.0, 0.25, 0.5]
    assert trace.describe() == "3 requests of trace.jsonl"
    with pytest.raises(ConfigError, match="speed"):
        read_trace(path, speed=0.0)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1, 2]",
        "not JSON",
        '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 10, "output_length": 1, "hash_ids": [1, 2]}',
        '{"timestamp": 1, "input_length": "ten", "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": Infinity, "output_length": 1, "hash_ids": []}',
        '{"timestamp": NaN, "input_length": 10, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 10, "output_length": -1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 10, "output_length": 1, "hash_ids": [], "images": [[512, 512]]}',
        '{"timestamp": 1, "input_length": 10, "output_length": 1, "hash_ids": [], "images": '
        '[{"start": 4, "tokens": 7, "height": 512, "width": 512}]}',
    ],
)
def test_a_line_of_another_schema_is_refused_by_its_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line(0, 10, [])) + f"\n\n{text}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 3: not a request of Mooncake's schema"):
        read_trace(path)


def test_files_that_hold_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no request"):
        read_trace(tmp_path / "empty.jsonl")
    (tmp_path / "other.db").write_bytes(b"SQLite format 3\0" + bytes(200))
    with pytest.raises(ConfigError, match=r"other\.db cannot be read"):
        read_trace(tmp_path / "other.db")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "latin.jsonl")


def write_journal(path: Path) -> None:
    """Two requests that ended, one of them with two answers, and one that did not."""

    async def work() -> None:
        journal = Journal(path)
        for number, n in ((0, 1), (1, 2), (2, 1)):
            params = ResolvedParams(n, 0.7, 0, 1.0, 0.0, 1, 50, 0, (2,), None)
            request = Request(f"r{number}", (5, 6, 7 + number), params, 12.5, namespace="apart", tenant="someone")
            record = Record(request, SamplingParams(n=n, seed=1), None, "/model")
            journal.add_entries([row_of(Entry(record, f"r{number}", 0, None, 1000.0 + 2 * number))])
            for index in range(n):
                ending = None if number == 2 else FinishReason.LENGTH
                journal.emitted(SequenceOutput(f"r{number}", index, [1, 2]), ended=False)
                journal.emitted(SequenceOutput(f"r{number}", index, [3 + index], None, ending), ended=number != 2)
        await journal.close()

    asyncio.run(work())


def test_a_journals_answers_are_asked_for_again(tmp_path: Path) -> None:
    write_journal(tmp_path / "journal")
    found = list(read_trace(tmp_path / "journal").arrivals())
    assert [(one.time, one.prompt.tolist(), one.answer.tolist()) for one in found] == [
        (0.0, [5, 6, 7], [1, 2, 3]),
        (2.0, [5, 6, 8], [1, 2, 3]),
        (2.0, [5, 6, 8], [1, 2, 4]),
    ]
    assert {(one.tenant, one.namespace) for one in found} == {("someone", "apart")}
    assert len({one.name for one in found}) == 3


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    write_journal(tmp_path / "journal")
    with sqlite3.connect(tmp_path / "journal") as database:
        database.execute("UPDATE requests SET record = x'00'")
    with pytest.raises(ConfigError, match=r"journal .* is damaged"):
        read_trace(tmp_path / "journal")


def play(chats: Chats, reading: float = 0.0) -> list[Arrival]:
    """All turns, each asked `reading` seconds after the last one came."""
    asked = []
    for first in chats.arrivals():
        arrival: Arrival | None = first
        while arrival is not None:
            asked.append(arrival)
            assert arrival.follow is not None
            arrival = arrival.follow(arrival.time + reading)
    return asked


def test_each_turn_of_a_chat_repeats_all_that_was_said() -> None:
    chats = Chats(chats_per_second=1, seconds=20, turns=4, system_prompts=2, system_tokens=50)
    turns: dict[str, list[Arrival]] = {}
    for arrival in play(chats):
        turns.setdefault(arrival.name.partition("-")[0], []).append(arrival)
    assert max(map(len, turns.values())) > 2
    for asked in turns.values():
        for before, after in pairwise(asked):
            said = before.prompt + before.answer
            assert after.prompt[: len(said)] == said
            assert len(after.prompt) > len(said)
            assert after.time >= before.time
    assert len({bytes(asked[0].prompt[:50]) for asked in turns.values()}) == 2


def test_chats_are_as_many_and_as_long_as_they_are_asked_to_be() -> None:
    chats = Chats(chats_per_second=20, seconds=100, turns=3, question_tokens=100, answer_tokens=60, seed=3)
    firsts, asked = list(chats.arrivals()), play(chats)
    assert len(firsts) == pytest.approx(2000, rel=0.1)
    assert len(asked) == pytest.approx(3 * len(firsts), rel=0.1)
    assert sum(len(one.answer) for one in asked) / len(asked) == pytest.approx(60, rel=0.1)
    assert [one.time for one in firsts] == sorted(one.time for one in firsts)
    assert [arrival.prompt for arrival in chats.arrivals()] == [one.prompt for one in firsts]


def test_chats_end_before_they_are_too_long_and_a_metronome_is_even() -> None:
    chats = Chats(
        chats_per_second=2,
        seconds=9.9,
        burstiness=0,
        turns=30,
        max_context=900,
        system_tokens=100,
        question_tokens=40,
        answer_tokens=40,
    )
    assert [arrival.time for arrival in chats.arrivals()] == pytest.approx([0.5 * (1 + n) for n in range(19)])
    assert max(len(one.prompt) + len(one.answer) for one in play(chats)) <= 900


def test_chats_of_endless_turns_end_with_their_context_and_hardly_any_burstiness_is_none() -> None:
    settings: dict[str, Any] = {"chats_per_second": 2, "seconds": 5, "max_context": 900, "system_prompts": 0}
    asked = play(Chats(**settings, turns=1e9))
    assert 900 / 2 < max(len(one.prompt) + len(one.answer) for one in asked) <= 900
    even, nearly = (list(Chats(**settings, burstiness=value).arrivals()) for value in (0, 1e-200))
    assert [one.time for one in even] == [one.time for one in nearly]


def test_tenants_are_drawn() -> None:
    assert {arrival.tenant for arrival in Chats(chats_per_second=5, seconds=20, tenants=3).arrivals()} == {
        "key-0",
        "key-1",
        "key-2",
    }


@pytest.mark.parametrize(
    "name", ["chats_per_second", "seconds", "turns", "question_tokens", "answer_tokens", "tenants"]
)
def test_chats_that_make_no_sense_are_refused(name: str) -> None:
    option: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be above 0"):
        Chats(**option)
    with pytest.raises(ConfigError, match="burstiness must be at least 0"):
        Chats(burstiness=-0.5)
