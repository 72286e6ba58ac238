"""Costs of steps: the fit finds what made the numbers, files keep it, data sheets give what they say."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from penstock.config.model_facts import KVSpec, LayerFacts, Matrix, ModelFacts, StateSpec
from penstock.config.weight_formats import FLOAT
from penstock.core.plan import ForwardPlan, SampleBatch, StepPlan
from penstock.errors import ConfigError
from penstock.simulator.cost_file import CostFile, read_cost_file
from penstock.simulator.costs import MeasuredCosts, MeasuredStep, StepShape, fit, median_error, shape_of
from penstock.simulator.hardware import (
    COMPUTE_SHARE,
    HARDWARE,
    MEMORY_SHARE,
    SPLIT_SHARE,
    STEP_OVERHEAD,
    roofline,
)
from tests.simulator.fleets import COSTS, make_settings


def random_steps(costs: MeasuredCosts, noise: float, outliers: float = 0.0) -> list[MeasuredStep]:
    rng = Random(5)
    steps = []
    for _ in range(600):
        samples = rng.choice([1, 2, 4, 8, 16])
        tokens = samples if rng.random() < 0.5 else rng.randint(samples, 512)
        keys = tokens + samples * rng.randint(0, 2000)
        shape = StepShape(tokens, samples, keys, keys + (tokens - samples) * rng.randint(0, 1000))
        factor = 3.0 if rng.random() < outliers else rng.gauss(1.0, noise)
        steps.append(MeasuredStep(shape, costs.seconds(shape) * factor))
    return steps


def test_the_shape_of_a_plan_counts_keys_once_and_pairs_by_query() -> None:
    from array import array

    forward = ForwardPlan([3, 1], [10, 7], array("i", [0] * 4), [0, 1], [], [], [2, 3])
    plan = StepPlan(forward, SampleBatch(indices=[0, 0], positions=[13, 8], sequences=[None, None]))  # type: ignore[list-item]
    assert shape_of(plan) == StepShape(tokens=4, samples=2, keys=13 + 8, pairs=(11 + 12 + 13) + 8)


def test_costs_are_linear_between_the_known_sizes_and_beyond() -> None:
    costs = MeasuredCosts(((1, 1.0), (3, 2.0), (7, 6.0)), 0.1, 0.01, 0.5)
    assert [costs.seconds(StepShape(tokens, 0, 0, 0)) for tokens in (1, 2, 3, 5, 7, 9)] == [
        1.0,
        1.5,
        2.0,
        4.0,
        6.0,
        8.0,
    ]
    assert costs.seconds(StepShape(1, 2, 10, 20)) == pytest.approx(1.0 + 1.0 + 1.0 + 0.2)


def test_the_fit_finds_the_costs_behind_exact_steps() -> None:
    steps = random_steps(COSTS, noise=0.0)
    assert median_error(fit(steps), steps) < 0.01


def test_three_tokens_may_cost_less_than_two() -> None:
    """Kernels multiply few tokens each in another way."""
    costs = MeasuredCosts(((1, 0.006), (2, 0.009), (3, 0.007), (4, 0.0075), (8, 0.01), (64, 0.05)), 1e-6, 2e-7, 1e-5)
    shapes = [StepShape(tokens, tokens, keys, keys) for tokens in range(1, 65) for keys in (tokens, 50 * tokens)] * 2
    found = fit([MeasuredStep(shape, costs.seconds(shape)) for shape in shapes])
    for tokens in range(1, 9):
        shape = StepShape(tokens, tokens, 100 * tokens, 100 * tokens)
        assert found.seconds(shape) == pytest.approx(costs.seconds(shape), rel=0.02)


def test_the_fit_is_not_led_astray_by_noise_and_outliers() -> None:
    found = fit(random_steps(COSTS, noise=0.05, outliers=0.03))
    exact = random_steps(COSTS, noise=0.0)
    assert median_error(found, exact) < 0.03
    assert min(found.per_key, found.per_pair, found.per_sample, *(seconds for _, seconds in found.base)) >= 0


def test_a_single_kind_of_step_can_be_fitted() -> None:
    steps = [MeasuredStep(StepShape(1, 1, 10, 10), 0.01)] * 5
    assert fit(steps).seconds(StepShape(1, 1, 10, 10)) == pytest.approx(0.01)


def test_a_file_of_costs_brings_them_back_with_the_engines_limits(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    written = CostFile(COSTS, make_settings(windows=(40,), checkpoint_every=4), 0.0123, 77)
    written.write(path)
    read = read_cost_file(path)
    assert (read.costs, read.median_error, read.num_steps) == (COSTS, 0.0123, 77)
    assert replace(read.settings, memory=written.settings.memory) == written.settings
    groups = [(group.num_blocks, group.window, group.checkpoint_every) for group in read.settings.memory.groups]
    assert groups == [(1000, None, None), (1000, 40, None), (266, None, 4)]
    assert "median error 1.2 %" in read.describe()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), 9),
        (("seconds", "base"), []),
        (("seconds", "base"), [[2, 0.1], [1, 0.2]]),
        (("seconds", "per_key"), -1.0),
        (("seconds",), None),
        (("engine", "block_size"), 0),
        (("engine", "max_num_batched_tokens"), 3),
        (("engine", "blocks"), "many"),
    ],
)
def test_a_damaged_file_of_costs_is_refused(tmp_path: Path, place: tuple[str, ...], value: object) -> None:
    path = tmp_path / "costs.json"
    CostFile(COSTS, make_settings(), 0.01, 7).write(path)
    content = json.loads(path.read_text())
    part = content
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"costs\.json is not a file of costs"):
        read_cost_file(path)


def test_a_missing_file_of_costs_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cost_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        CostFile(COSTS, make_settings(), 0.01, 7).write(tmp_path / "none" / "costs.json")


FACTS = ModelFacts(
    name="small",
    dtype="bfloat16",
    num_parameters=1000 * 64 + 2 * 64 * 64,
    max_position=4096,
    vocab_size=1000,
    hidden_size=64,
    layers=(
        LayerFacts(KVSpec(2, 16), ()),
        LayerFacts(KVSpec(2, 16, 128), ()),
        LayerFacts(StateSpec(((4, 16),)), ()),
        LayerFacts(None, ()),
    ),
    rotary_dim=16,
    matrices=(
        Matrix("a", 64, 64, FLOAT),
        Matrix("b", 64, 64, FLOAT),
        Matrix("embedding", 1000, 64, FLOAT, multiplied=False),
        Matrix("output", 1000, 64, FLOAT),
    ),
)


def test_a_roofline_takes_what_is_slower_of_reading_weights_and_multiplying() -> None:
    h100 = HARDWARE["h100-sxm"]
    settings = make_settings(memory=replace(make_settings().memory, weights=10**9))
    costs = roofline(FACTS, settings, h100)
    few = costs.seconds(StepShape(1, 0, 0, 0))
    window = 4 * 64 * 128 / (COMPUTE_SHARE * h100.flops)  # in which attention is always reckoned with
    assert few == pytest.approx(STEP_OVERHEAD + 10**9 / (MEMORY_SHARE * h100.bandwidth))
    tokens = 10**8
    assert costs.seconds(StepShape(tokens, 0, 0, 0)) == pytest.approx(
        STEP_OVERHEAD + tokens * (2 * 2 * 64 * 64 / (COMPUTE_SHARE * h100.flops) + window)
    )
    a_key = 2 * 2 * 16 * 2 / (MEMORY_SHARE * h100.bandwidth)
    a_pair = 4 * 64 / (COMPUTE_SHARE * h100.flops)
    a_sample = 2 * 64 * 1000 / (COMPUTE_SHARE * h100.flops)
    fixed = (128 * 2 * 2 * 16 * 2 + 2 * 4 * 4 * 16) / (MEMORY_SHARE * h100.bandwidth)  # a window and a state
    assert costs.seconds(StepShape(1, 0, 1000, 3000)) - few == pytest.approx(1000 * a_key + 3000 * a_pair)
    assert costs.per_sample == pytest.approx(a_sample + fixed)


def test_several_devices_have_all_their_memory_and_most_of_their_speed() -> None:
    one, four = HARDWARE["h200"], HARDWARE["h200"].times(4)
    assert four.memory == 4 * one.memory
    assert four.bandwidth == 4 * SPLIT_SHARE * one.bandwidth
    assert one.times(1) is one
    with pytest.raises(ConfigError, match="devices"):
        one.times(0)
