"""Blocks that are written and loaded beside the steps, with damage and deaths at any moment: never another answer."""

import random
from array import array
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import BlockSource, Request
from penstock.config.footprint import PoolLimits
from penstock.config.memory import layer_groups
from penstock.config.model_facts import KVSpec
from penstock.core.block_keys import block_keys
from penstock.core.block_tier import LOAD_SECONDS, BlockTier
from penstock.core.fairness import QUEUE_POLICIES
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.scheduler import Scheduler
from penstock.core.stored_blocks import StoredTree
from tests.core.block_files import FakeFile, FakeIO
from tests.core.fakes import FakeRunner, make_request, run_step
from tests.core.test_scheduler_properties import MAX_LEN, Traffic, requests

BLOCK_SIZE = 4
LONG = [1, 2, 3, 4, 5, 6, 8, 9, 1, 1, 2, 2, 3, 3, 4, 4, 5]
"""Four blocks, and a token that is always computed."""


def text_keys(tokens: list[int]) -> Iterator[bytes]:
    return block_keys(array("i", tokens), (), BLOCK_SIZE, len(tokens) // BLOCK_SIZE)


class StoredEngine:
    """A scheduler over a file of blocks, and what its threads have to do."""

    def __init__(
        self,
        file: FakeFile,
        *,
        num_slots: int = 16,
        num_blocks: int = 16,
        policy: str = "fcfs",
        peers: dict[str, FakeFile] | None = None,
        windows: tuple[int, ...] = (),
    ) -> None:
        self.now = 0.0
        limits = PoolLimits(MAX_LEN + 1, 4, 16, BLOCK_SIZE)
        layers = layer_groups([KVSpec(1, 4, window) for window in (None, *windows)], limits, num_blocks)
        groups = tuple(CacheGroup(group.num_blocks, group.window) for group in layers)
        self.runner = FakeRunner(groups, BLOCK_SIZE)
        self.io = FakeIO(file, self.runner, peers or {})
        kv = KVManager(groups, BLOCK_SIZE, 4)
        found = [record for record, _ in file.records.values()]
        self.tier = BlockTier(kv, StoredTree(num_slots, found), self.io, lambda: self.now)
        queue = QUEUE_POLICIES[policy]()
        self.scheduler = Scheduler(kv, queue, max_num_seqs=4, max_num_batched_tokens=16, tier=self.tier)

    def settle(self) -> None:
        """Let the threads do all that they have to."""
        self.tier.poll()
        while self.io.writer or self.io.readers:
            self.io.work(1)
            self.tier.poll()

    def answer(
        self, prompt: list[int], name: str = "r", namespace: str = "", *, tokens: int = 3
    ) -> tuple[list[int], int]:
        """A request's tokens with threads as fast as can be, and how many of its prompt's were found."""
        self.scheduler.add_request(make_request(name, prompt, tokens, namespace=namespace, stop_token_ids=()))
        told: list[int] = []
        cached = 0
        while self.scheduler.has_work:
            for output in run_step(self.scheduler, self.runner):
                told += output.token_ids
                cached += output.num_cached_tokens
            self.scheduler.check_integrity()
            self.settle()
        return told, cached

    def source_of(self, prompt: tuple[int, ...], namespace: str) -> BlockSource:
        """Where the blocks of a text are that was computed here."""
        self.tier.export("r", namespace, text_keys(list(prompt)))
        ((_, source),) = self.tier.drain_exports()
        return source


def test_a_restarted_engine_finds_what_the_last_one_had_written() -> None:
    file = FakeFile()
    answer, cached = StoredEngine(file).answer(LONG)
    assert cached == 0
    assert StoredEngine(file).answer(LONG) == (answer, 16)


def test_what_was_evicted_comes_back_from_the_file() -> None:
    engine = StoredEngine(FakeFile(), num_blocks=6)
    answer, _ = engine.answer(LONG)
    engine.answer([9] * 20, "other")
    assert engine.answer(LONG, "again") == (answer, 16)
    assert engine.tier.stats.loaded == 4


def test_namespaces_do_not_find_each_others_blocks_in_the_file() -> None:
    file = FakeFile()
    StoredEngine(file).answer(LONG, namespace="one")
    assert StoredEngine(file).answer(LONG, namespace="two")[1] == 0
    assert StoredEngine(file).answer(LONG, namespace="one")[1] == 16


def test_a_damaged_block_costs_itself_and_what_follows_it() -> None:
    file = FakeFile()
    answer, _ = StoredEngine(file).answer(LONG)
    third = next(slot for slot, (record, _) in file.records.items() if record.depth == 2)
    file.contents[third, 0] = [None] * BLOCK_SIZE
    engine = StoredEngine(file)
    assert engine.answer(LONG) == (answer, 8)
    assert engine.tier.stats.missed == 1
    assert StoredEngine(file).answer(LONG) == (answer, 16), "it is written anew"


def test_a_record_whose_parent_is_gone_is_forgotten_at_the_start() -> None:
    file = FakeFile()
    StoredEngine(file).answer(LONG)
    first = next(slot for slot, (record, _) in file.records.items() if record.depth == 0)
    del file.records[first]
    engine = StoredEngine(file)
    assert len(engine.tier.tree) == 0
    assert engine.answer(LONG)[1] == 0


def test_a_file_that_is_full_costs_the_cache_only() -> None:
    file = FakeFile()
    file.is_full = True
    engine = StoredEngine(file)
    answer, _ = engine.answer(LONG)
    assert engine.tier.stats.unwritten == 4
    assert engine.answer(LONG) == (answer, 16), "the blocks in memory are as good as ever"
    file.is_full = False
    engine.answer([*LONG, 8, 8, 8, 8, 8], "longer")
    assert StoredEngine(file).answer(LONG) == (answer, 16), "it is written with what follows it"


def test_the_least_recently_used_text_leaves_a_full_file_first() -> None:
    file = FakeFile()
    engine = StoredEngine(file, num_slots=10, num_blocks=6)
    engine.answer(LONG, "a")
    engine.answer([8] * 17, "b")
    engine.answer(LONG, "c")
    engine.answer([9] * 17, "d")
    fresh = StoredEngine(file, num_slots=10)
    assert fresh.answer(LONG)[1] == 16
    assert fresh.answer([8] * 17)[1] < 16


def test_of_a_window_the_blocks_that_are_seen_come_back_and_go_on() -> None:
    file = FakeFile()
    answer, _ = StoredEngine(file, windows=(6,)).answer(LONG)
    engine = StoredEngine(file, windows=(6,))
    assert engine.answer(LONG) == (answer, 16)
    assert engine.tier.stats.loaded == 4 + 2
    deepest = next(slot for slot, (record, _) in file.records.items() if record.depth == 3)
    file.contents[deepest, 1] = [None] * BLOCK_SIZE
    engine = StoredEngine(file, windows=(6,))
    assert engine.answer(LONG) == (answer, 12)


def test_a_peers_blocks_are_pulled_and_kept() -> None:
    theirs, mine = FakeFile(), FakeFile()
    peer = StoredEngine(theirs)
    answer, _ = peer.answer(LONG)
    engine = StoredEngine(mine, peers={"own": theirs})
    engine.tier.expect("r", peer.source_of(tuple(LONG), ""))
    assert engine.answer(LONG) == (answer, 16)
    assert engine.tier.stats.pulled == 4
    assert StoredEngine(mine).answer(LONG) == (answer, 16)


def test_the_source_of_a_request_is_forgotten_when_it_is_handed_over() -> None:
    theirs = FakeFile()
    peer = StoredEngine(theirs)
    peer.answer(LONG)
    engine = StoredEngine(FakeFile(), peers={"own": theirs})
    engine.tier.expect("r", peer.source_of(tuple(LONG), ""))
    engine.tier.export("r", "", text_keys(LONG))
    assert engine.answer(LONG)[1] == 0
    assert engine.tier.stats.pulled == 0


def test_what_a_peer_has_overwritten_is_computed() -> None:
    theirs = FakeFile()
    peer = StoredEngine(theirs, num_slots=4)
    answer, _ = peer.answer(LONG)
    source = peer.source_of(tuple(LONG), "")
    peer.answer([9] * 17, "other")
    engine = StoredEngine(FakeFile(), peers={"own": theirs})
    engine.tier.expect("r", source)
    assert engine.answer(LONG) == (answer, 0)
    assert engine.tier.stats.missed == 4


def test_an_export_is_told_when_all_of_it_is_written() -> None:
    file = FakeFile()
    engine = StoredEngine(file)
    engine.scheduler.add_request(make_request("r", LONG, 1, stop_token_ids=()))
    while engine.scheduler.has_work:
        run_step(engine.scheduler, engine.runner)
    engine.tier.export("r", "", text_keys(LONG))
    while not (told := list(engine.tier.drain_exports())):
        assert engine.io.writer
        engine.io.work(1)
        engine.tier.poll()
    assert len(file.records) == 4
    assert [(request_id, len(source.slots)) for request_id, source in told] == [("r", 4)]


def test_a_sequence_goes_on_without_a_load_that_takes_too_long() -> None:
    file = FakeFile()
    answer, _ = StoredEngine(file).answer(LONG)
    engine = StoredEngine(file)
    engine.scheduler.add_request(make_request("r", LONG, 3, stop_token_ids=()))
    assert engine.scheduler.schedule() is None
    engine.now = LOAD_SECONDS + 1
    tokens = []
    while engine.scheduler.has_work:
        tokens += [token for output in run_step(engine.scheduler, engine.runner) for token in output.token_ids]
        engine.scheduler.check_integrity()
    assert tokens == answer
    assert engine.tier.stats.late == 1
    engine.settle()
    engine.scheduler.check_integrity()


def test_running_sequences_go_on_while_another_waits_for_its_load() -> None:
    file = FakeFile()
    StoredEngine(file).answer(LONG)
    engine = StoredEngine(file)
    engine.scheduler.add_request(make_request("first", [3, 3], 6, stop_token_ids=()))
    run_step(engine.scheduler, engine.runner)
    engine.scheduler.add_request(make_request("r", LONG, 3, stop_token_ids=()))
    assert [output.request_id for output in run_step(engine.scheduler, engine.runner)] == ["first"]
    assert engine.scheduler.trace.blocked == ("r", "loading")


def test_a_sequence_that_runs_alone_waits_for_blocks_that_are_being_loaded() -> None:
    file = FakeFile()
    answer, _ = StoredEngine(file, num_blocks=7).answer([3, 3, 3], tokens=12)
    StoredEngine(file, num_blocks=7).answer(LONG)
    engine = StoredEngine(file, num_blocks=7)
    engine.scheduler.add_request(make_request("alone", [3, 3, 3], 12, stop_token_ids=()))
    tokens = [token for output in run_step(engine.scheduler, engine.runner) for token in output.token_ids]
    engine.scheduler.add_request(make_request("r", LONG, 3, stop_token_ids=()))
    while (plan := engine.scheduler.schedule()) is not None:
        outputs = engine.scheduler.update(engine.runner.execute(plan))
        tokens += [token for output in outputs for token in output.token_ids]
    assert engine.tier.is_loading
    assert len(tokens) == 10, "its blocks are full"
    while engine.scheduler.has_work:
        engine.settle()
        outputs = run_step(engine.scheduler, engine.runner)
        tokens += [token for output in outputs if output.request_id == "alone" for token in output.token_ids]
    assert tokens == answer


def test_the_first_of_those_that_wait_are_loaded_together() -> None:
    file = FakeFile()
    first = StoredEngine(file)
    prompts = [[number] * 6 for number in range(1, 4)]
    answers = [first.answer(prompt, str(prompt))[0] for prompt in prompts]
    engine = StoredEngine(file)
    for number, prompt in enumerate(prompts):
        engine.scheduler.add_request(make_request(str(number), prompt, 3, stop_token_ids=()))
    assert engine.scheduler.schedule() is None
    assert len(engine.io.readers) == 3
    engine.settle()
    told: dict[str, list[int]] = {}
    for output in run_step(engine.scheduler, engine.runner):
        told[output.request_id] = output.token_ids
    assert told == {str(number): answer[:1] for number, answer in enumerate(answers)}, "they start together"


EVENTS = st.lists(
    st.one_of(
        requests(),
        requests(),
        st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1])),
        st.integers(1, 6),
        st.tuples(st.just("io"), st.lists(st.integers(0, 40), max_size=40)),
        st.tuples(st.just("damage"), st.integers(0, 12), st.sampled_from(["content", "record", "swap"])),
        st.sampled_from(["killed", "late", "full", "peer"]),
    ),
    min_size=1,
    max_size=40,
)


class StoredTraffic(Traffic):
    """Traffic over engines with a file of blocks, and a peer that has computed some of the prompts."""

    def __init__(self, num_blocks: int, num_slots: int, policy: str, seed: int, windows: tuple[int, ...]) -> None:
        self.random = random.Random(seed)
        self.file, self.peers = FakeFile(), {"own": FakeFile()}
        self.peer = StoredEngine(self.peers["own"], num_slots=num_slots, windows=windows)

        def make() -> Scheduler:
            self.engine = StoredEngine(
                self.file,
                num_slots=num_slots,
                num_blocks=num_blocks,
                policy=policy,
                peers=self.peers,
                windows=windows,
            )
            self.runner = self.engine.runner
            return self.engine.scheduler

        super().__init__(make, FakeRunner(num_blocks, BLOCK_SIZE), 16)
        self.runner = self.engine.runner

    def play_one(self, event: Any) -> None:
        engine = self.engine
        if isinstance(event, tuple) and event[0] == "io":
            for number in event[1]:
                engine.io.work(number)
        elif isinstance(event, tuple) and event[0] == "damage":
            self.damage(event[1], event[2])
        elif event == "late":
            engine.now += LOAD_SECONDS + 1
        elif event == "full":
            self.file.is_full = not self.file.is_full
        elif event == "peer":
            self.peers.clear()
        else:
            super().play_one(event)
        engine.tier.poll()

    def add(self, event: dict) -> None:
        super().add(event)
        request = self.requests[f"r{len(self.requests) - 1}"]
        if self.random.random() < 0.3:
            self.expect(request)

    def expect(self, request: Request) -> None:
        prompt, namespace = request.prompt_token_ids, request.namespace
        self.peer.answer(list(prompt), request.request_id, namespace)
        self.engine.tier.expect(request.request_id, self.peer.source_of(prompt, namespace))

    def damage(self, number: int, kind: str) -> None:
        contents, group = self.file.contents, number % 2
        slot, other = (number // 2, group), (number // 2 + 1, group)
        if kind == "record":
            self.file.records.pop(slot[0], None)
        elif kind == "content" and slot in contents:
            contents[slot] = [None] * BLOCK_SIZE
        elif kind == "swap" and slot in contents and other in contents:
            contents[slot], contents[other] = contents[other], contents[slot]

    def step(self) -> None:
        for _ in range(self.random.randrange(6)):
            self.engine.io.work(self.random.randrange(40))
        self.engine.tier.poll()
        plan = self.scheduler.schedule()
        if plan is None:
            self.collected.add(self.scheduler.drain())
            assert self.engine.tier.is_loading or not self.scheduler.has_work, "there is work, but nothing is done"
            self.engine.io.work(1)
            return
        self.steps += 1
        self.collected.add(self.scheduler.update(self.runner.execute(plan)))
        self.scheduler.check_integrity()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=EVENTS,
    num_blocks=st.integers(6, 20),
    num_slots=st.integers(1, 24),
    policy=st.sampled_from(["fair", "fcfs"]),
    seed=st.integers(0, 1000),
    windows=st.sampled_from([(), (1,), (6,), (8, 2)]),
)
def test_answers_are_the_same_whatever_becomes_of_the_file_and_its_threads(
    events: list, num_blocks: int, num_slots: int, policy: str, seed: int, windows: tuple[int, ...]
) -> None:
    traffic = StoredTraffic(num_blocks, num_slots, policy, seed, windows)
    traffic.play(events)
    traffic.check()
    traffic.engine.settle()
    traffic.scheduler.check_integrity()
