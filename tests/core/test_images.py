"""Images in the scheduler: keys by content, and the tower's layers within the step's budget."""

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import ErrorReason, FinishReason, Image
from penstock.api.sampling_params import Beams
from penstock.config.footprint import PoolLimits
from penstock.config.memory import layer_groups
from penstock.config.model_facts import KVSpec
from penstock.core.block_keys import block_key, block_keys
from penstock.core.block_tier import BlockTier
from penstock.core.fairness import FairQueue
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation
from penstock.core.stored_blocks import StoredTree
from tests.core.block_files import FakeFile, FakeIO
from tests.core.drafters import UnsteadyClock, WhimsicalDrafter
from tests.core.fakes import make_request, make_scheduler
from tests.core.images import PLACEHOLDER, ImageRunner, make_image, make_images, make_tower, placeholders
from tests.core.test_scheduler_properties import MAX_LEN, Traffic

MakeTier = Callable[[KVManager], BlockTier]


def prompt_of(*parts: int | Image) -> tuple[list[int], tuple[Image, ...]]:
    """Tokens, and images in their places."""
    tokens: list[int] = []
    images: list[Image] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        images.append(Image(len(tokens), *(getattr(part, name) for name in Image.__slots__[1:])))
        tokens += placeholders(part)
    return tokens, tuple(images)


class ImageTraffic(Traffic):
    """Traffic whose requests have seeds of their own, by which the runner knows them; perhaps with a file of blocks."""

    def __init__(self, make: Callable[[MakeTier | None], Scheduler], runner: ImageRunner, budget: int, file: FakeFile):
        self.images, self.random, self.io = runner, random.Random(7), FakeIO(file, runner, {})

        def start() -> Scheduler:
            runner.layers.clear()  # a killed engine's features are gone
            self.io = FakeIO(file, runner, {})
            found = [record for record, _ in file.records.values()]
            return make(None if file.is_full else lambda kv: BlockTier(kv, StoredTree(10, found), self.io, lambda: 0.0))

        super().__init__(start, runner, budget)

    def add(self, event: dict[str, Any]) -> None:
        seed = len(self.requests)
        self.images.requests[seed] = make_request(f"r{seed}", **event, seed=seed)
        super().add(event | {"seed": seed})

    def step(self) -> None:
        tier = self.scheduler.tier
        if tier is None:
            super().step()
            return
        for _ in range(self.random.randrange(6)):
            self.io.work(self.random.randrange(40))
        tier.poll()
        plan = self.scheduler.schedule()
        self.steps += 1
        if plan is not None:
            self.collected.add(self.scheduler.update(self.runner.execute(plan)))
            self.scheduler.check_integrity()
            return
        self.collected.add(self.scheduler.drain())
        assert tier.is_loading or not self.scheduler.has_work, "there is work, but nothing is done"
        self.io.work(1)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that share beginnings, with equal and with other images in equal places."""
    parts: list[int | Image] = [*draw(st.sampled_from([[], [1] * 4, [1, 2, 3]]))]
    breaks = draw(st.booleans())
    for _ in range(draw(st.integers(0, 2))):
        rows, columns = draw(st.sampled_from([(1, 2), (2, 2), (2, 3)]))
        parts.append(make_image(draw(st.integers(0, 2)), rows, columns, breaks=breaks))
        parts += draw(st.lists(st.sampled_from([0, 1, PLACEHOLDER]), max_size=3))
    if not parts or draw(st.booleans()):
        parts.append(2)
    tokens, images = prompt_of(*parts)
    return {
        "prompt": tokens,
        "images": images,
        "max_tokens": draw(st.integers(1, max(1, min(6, MAX_LEN - len(tokens))))),
        "n": draw(st.sampled_from([1, 1, 2])),
        "beams": draw(st.sampled_from([None, None, None, Beams(2, 1.0, False)])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
        "priority": draw(st.integers(0, 2)),
        "tenant": draw(st.sampled_from(["", "a", "b"])),
    }


EVENTS = st.lists(
    st.one_of(
        requests(),
        requests(),
        st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1])),
        st.integers(1, 6),
        st.just("killed"),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=EVENTS,
    num_blocks=st.integers(7, 16),
    extra_budget=st.integers(0, 12),
    caching=st.sampled_from([True, True, False]),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    feature_bytes=st.sampled_from([24, 48, 100]),
    layer_cost=st.integers(1, 40),
    attends_within=st.booleans(),
    drafts=st.booleans(),
    windows=st.sampled_from([(None,), (None, 6)]),
    stored=st.booleans(),
)
def test_whatever_is_encoded_cached_or_freed_every_answer_is_that_of_its_own_pixels(
    events: list[Any],
    num_blocks: int,
    extra_budget: int,
    caching: bool,
    policy: str,
    feature_bytes: int,
    layer_cost: int,
    attends_within: bool,
    drafts: bool,
    windows: tuple[int | None, ...],
    stored: bool,
) -> None:
    budget = 4 + extra_budget + 8 * attends_within
    tower = make_tower(layer_elements=layer_cost, attends_within=attends_within)
    images = make_images(tower, feature_bytes)
    layers = layer_groups(
        [KVSpec(1, 4, window) for window in windows], PoolLimits(MAX_LEN + 1, 4, budget, 4), num_blocks
    )
    groups = tuple(CacheGroup(group.num_blocks, group.window) for group in layers)
    runner = ImageRunner(groups, 4, images)

    def make(make_tier: MakeTier | None) -> Scheduler:
        return make_scheduler(
            groups=groups,
            max_num_seqs=4,
            budget=budget,
            caching=caching or stored,
            policy=policy,
            images=images,
            speculation=Speculation([WhimsicalDrafter(runner, 0.8)], 3, UnsteadyClock()) if drafts else None,
            make_tier=make_tier,
        )

    file = FakeFile()
    file.is_full = not stored
    traffic = ImageTraffic(make, runner, budget, file)
    traffic.play(events)
    traffic.check()


def about_a_window(event: dict[str, Any], name: int) -> dict[str, Any]:
    """The request with a window of audio instead of images."""
    window = make_image(name)
    return event | {"images": (replace(window, count=MAX_LEN),)}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(
        st.one_of(
            st.builds(about_a_window, requests(), st.integers(0, 4)),
            st.builds(about_a_window, requests(), st.integers(0, 4)),
            st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1])),
            st.integers(1, 6),
            st.just("killed"),
        ),
        min_size=1,
        max_size=25,
    ),
    num_blocks=st.integers(7, 16),
    extra_budget=st.integers(0, 12),
    caching=st.booleans(),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    windows_that_fit=st.integers(1, 3),
    layer_cost=st.integers(1, 40),
)
def test_every_token_is_computed_while_its_window_of_audio_is_there(
    events: list[Any],
    num_blocks: int,
    extra_budget: int,
    caching: bool,
    policy: str,
    windows_that_fit: int,
    layer_cost: int,
) -> None:
    """The runner checks it; there are windows of five sounds, and room for fewer."""
    tower, budget, groups = make_tower(layer_elements=layer_cost, is_attended=True), 4 + extra_budget, (num_blocks,)
    images = make_images(tower, 24 * windows_that_fit)
    runner = ImageRunner(tuple(map(CacheGroup, groups)), 4, images)

    def make(make_tier: MakeTier | None) -> Scheduler:
        return make_scheduler(
            groups=tuple(map(CacheGroup, groups)),
            max_num_seqs=4,
            budget=budget,
            caching=caching,
            policy=policy,
            images=images,
        )

    file = FakeFile()
    file.is_full = True
    traffic = ImageTraffic(make, runner, budget, file)
    traffic.play(events)
    traffic.check()


def run(scheduler: Scheduler, runner: ImageRunner, most: int = 100) -> list[tuple[list[int], list[bytes]]]:
    """Each step's numbers of tokens, and the digests of the images in the tower."""
    steps = []
    while scheduler.has_work and len(steps) < most:
        plan = scheduler.schedule()
        if plan is None:
            scheduler.drain()
            continue
        steps.append((plan.forward.query_lens[:], [part.digest for part in plan.forward.encode]))
        scheduler.update(runner.execute(plan))
        scheduler.check_integrity()
    return steps


def engine(*, budget: int = 16, token_elements: int = 4, **tower: Any) -> tuple[Scheduler, ImageRunner]:
    images = make_images(make_tower(**tower), token_elements=token_elements)
    scheduler = make_scheduler(groups=(CacheGroup(32),), budget=budget, images=images)
    return scheduler, ImageRunner((CacheGroup(32),), 4, images)


def add(scheduler: Scheduler, runner: ImageRunner, *parts: int | Image, tokens: int = 1, tenant: str = "") -> str:
    seed = len(runner.requests)
    prompt, images = prompt_of(*parts)
    request = make_request(f"r{seed}", prompt, tokens, images=images, seed=seed, stop_token_ids=(), tenant=tenant)
    runner.requests[seed] = request
    scheduler.add_request(request)
    return request.request_id


def test_a_second_turn_about_an_image_finds_its_blocks_and_encodes_nothing() -> None:
    scheduler, runner = engine()
    picture, other = make_image(1), make_image(2)
    add(scheduler, runner, 1, 1, picture, 2)
    run(scheduler, runner)
    assert (runner.num_encoded, scheduler.kv.hit_tokens) == (1, 0)
    add(scheduler, runner, 1, 1, picture, 2, 3, 4)
    assert run(scheduler, runner) == [([3], [])]
    add(scheduler, runner, 1, 1, other, 2, 3, 4)
    run(scheduler, runner)
    assert (runner.num_encoded, scheduler.kv.hit_tokens) == (2, 8)


def test_decodes_keep_their_pace_while_an_image_takes_many_steps() -> None:
    scheduler, runner = engine(budget=4, layer_elements=12)  # a layer of the image costs 36 tokens
    add(scheduler, runner, 1, tokens=8)
    run(scheduler, runner, 1)
    picture = make_image(1)
    add(scheduler, runner, 2, picture, 2)
    steps = run(scheduler, runner)
    assert [counts[0] for counts, _ in steps[:7]] == [1] * 7
    assert not any(digests for _, digests in steps[:7]), "a layer would exceed the budget, and it is not the oldest"
    assert [digests for _, digests in steps[7:10]] == [[picture.digest]] * 3, "the oldest gets a layer a step"
    assert sum(sum(counts) for counts, _ in steps) == 7 + 8


def test_a_chunk_ends_before_an_image_that_is_not_ready_and_then_goes_over_it() -> None:
    scheduler, runner = engine(budget=8, layer_elements=0)  # 18 multiplied per 4: a layer costs 18 tokens
    picture = make_image(1, 1, 2)
    add(scheduler, runner, 1, 2, 3, picture, 4)
    steps = run(scheduler, runner)
    assert steps[0][0] == [3]
    assert sum(len(digests) for _, digests in steps) == 2, "in two steps, as the budget allows"


def test_images_that_attend_within_are_computed_in_one_step() -> None:
    scheduler, runner = engine(budget=12, attends_within=True, token_elements=1000)
    add(scheduler, runner, *range(8), make_image(1), 2)
    assert [counts for counts, _ in run(scheduler, runner)] == [[8], [7]], "three tokens of it would fit the first"


def test_positions_of_a_step_follow_each_sequences_images() -> None:
    scheduler, runner = engine(rope_axes=True, token_elements=1000)
    add(scheduler, runner, 1, 2, 3)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.forward.rope_positions is None, "a step of text alone has plain positions"
    scheduler.update(runner.execute(plan))
    add(scheduler, runner, 4, make_image(1, 1, 2), 5, tokens=2)
    add(scheduler, runner, 6, 7)
    positions = []
    while (plan := scheduler.schedule()) is not None:
        assert plan.forward.rope_positions is not None
        positions.append(plan.forward.rope_positions.tolist())
        scheduler.update(runner.execute(plan))
    time, height, width = [0, 1, 1, 3, 0, 1], [0, 1, 1, 3, 0, 1], [0, 1, 2, 3, 0, 1]
    assert positions == [time + height + width, [4, 4, 4]]


def test_features_that_are_not_finite_end_the_requests_with_that_image_and_no_others() -> None:
    scheduler, runner = engine(budget=32)
    good, bad = make_image(1), make_image(2)
    runner.broken.add(bad.digest)
    names = [add(scheduler, runner, 1, one, 2, tokens=2) for one in (good, bad, bad)]
    endings = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        for output in scheduler.update(runner.execute(plan)):
            if output.finish_reason is not None:
                endings[output.request_id] = output.finish_reason, output.error_reason
        scheduler.check_integrity()
    broken = FinishReason.ERROR, ErrorReason.IMAGE_NOT_ENCODED
    assert endings == {names[0]: (FinishReason.LENGTH, None), names[1]: broken, names[2]: broken}
    runner.broken.clear()
    add(scheduler, runner, 1, bad, 2)
    run(scheduler, runner)  # the runner finds no key of the broken features


def test_a_failed_step_ends_the_requests_of_its_images_which_are_encoded_anew() -> None:
    scheduler, runner = engine(budget=4, layer_elements=8)
    picture = make_image(1)
    add(scheduler, runner, picture, 2)
    assert scheduler.schedule() is not None
    assert scheduler.request_indices() == [0], "the step is named as that of its image's request"
    (ending,) = scheduler.fail_step("it failed")
    assert ending.finish_reason is FinishReason.ERROR
    add(scheduler, runner, picture, 2)
    run(scheduler, runner)
    assert runner.num_encoded == 1


def test_an_image_larger_than_the_tower_takes_is_refused_by_name() -> None:
    scheduler, _ = engine()
    tokens, images = prompt_of(make_image(1, 3, 5), 1)
    refusal = scheduler.refusal(make_request("r", tokens, images=images))
    assert refusal is not None
    assert "6 x 10 pixels takes 15 tokens of 15 patches; this model's vision tower encodes at most 12 tokens" in refusal
    sounds = tuple(replace(image, is_sound=True) for image in images)
    refusal = scheduler.refusal(make_request("r", tokens, images=sounds))
    assert refusal == "this model takes text and images, not sounds"
    refusal = make_scheduler().refusal(make_request("r", tokens, images=images))
    assert refusal == "this model takes text only: leave images and sounds out"


def test_an_image_is_charged_to_the_tenant_whose_turn_comes_first() -> None:
    images = make_images(make_tower(layer_elements=4))
    scheduler = make_scheduler(groups=(CacheGroup(32),), budget=64, images=images, policy="fair")
    runner = ImageRunner((CacheGroup(32),), 4, images)
    add(scheduler, runner, make_image(1), 2, tenant="a")
    add(scheduler, runner, make_image(1), 2, tenant="b")
    run(scheduler, runner)
    queue = scheduler.queue
    assert isinstance(queue, FairQueue)
    assert abs(queue.counter("a") - queue.counter("b")) == 3 * images.layer_tokens(make_image(1))


def test_keys_of_blocks_are_their_tokens_and_the_content_and_place_of_images() -> None:
    tokens, images = prompt_of(1, 2, make_image(1), 3, *[4] * 7)
    text = array("i", tokens)
    keys = list(block_keys(text, images, 4, 4))
    assert keys == [block_key(text, images, index, 4) for index in range(4)]
    plain = [text[start : start + 4].tobytes() for start in range(0, 16, 4)]
    assert list(block_keys(text, (), 4, 4)) == plain
    assert [len(key) - 16 for key in keys] == [32, 32, 0, 0]
    moved, moved_images = prompt_of(1, 2, PLACEHOLDER, make_image(1))
    assert block_key(array("i", moved), moved_images, 0, 4) != keys[0], "text before an image may be its placeholder"
    others = prompt_of(1, 2, make_image(2))[1]
    assert block_key(text, others, 0, 4) != keys[0]
