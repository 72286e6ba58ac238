"""Calibration: real steps of a real engine are measured with their shapes, and fitted."""

import time
from collections import Counter
from pathlib import Path

import pytest

from penstock.config.engine_config import EngineConfig
from penstock.diagnose.calibrate import MeasuredEngine, calibrate, measure
from penstock.errors import ConfigError
from penstock.simulator.cost_file import read_cost_file
from penstock.simulator.simulation import Fleet, Simulation
from tests.simulator.test_simulation import Requests


def config(tiny_llama: Path) -> EngineConfig:
    return EngineConfig.from_options(
        model=str(tiny_llama), kv_cache_memory="8MiB", threads=1, max_num_seqs=8, max_num_batched_tokens=64
    )


def test_measured_steps_are_of_many_shapes(tiny_llama: Path) -> None:
    engine = MeasuredEngine(config(tiny_llama))
    try:
        steps = measure(engine, 1.0)
        engine.core.check_integrity()
        assert not engine.core.has_work
    finally:
        engine.close()
    assert all(step.seconds > 0 for step in steps)
    decodes = Counter(step.shape.tokens for step in steps if step.shape.tokens == step.shape.samples)
    assert {1, 2, 4, 8} <= decodes.keys()
    assert max(step.shape.tokens for step in steps) == 64
    assert all(step.shape.tokens <= step.shape.keys <= step.shape.pairs for step in steps)


def test_all_batches_decode_at_long_contexts_too(tiny_llama: Path) -> None:
    engine = MeasuredEngine(config(tiny_llama))
    try:
        steps = measure(engine, 3.0, time.process_time)
    finally:
        engine.close()
    for batch in (1, 2, 4, 8):
        keys = [step.shape.keys for step in steps if step.shape.tokens == step.shape.samples == batch]
        assert max(keys) >= batch * 190, f"{batch} sequences"


def test_what_a_calibration_finds_can_be_simulated(tiny_llama: Path, tmp_path: Path) -> None:
    found = calibrate(config(tiny_llama), 1.0)
    found.write(tmp_path / "costs.json")
    read = read_cost_file(tmp_path / "costs.json")
    assert read.costs == found.costs
    assert read.settings.max_num_batched_tokens == 64
    outcome = Simulation(Fleet(read.settings, read.costs), Requests(((0.0, 100, 10),))).run()
    assert 0 < outcome.first_tokens[0] < outcome.ends[0] < 10


def test_too_short_a_calibration_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="measure longer"):
        calibrate(config(tiny_llama), 1e-9)
