"""Metrics of engines and their steps."""

from dataclasses import replace

from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.core.plan import StepTrace
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.frontend.meter import MAX_STEPS_KEPT, Meter
from penstock.frontend.metrics import Metrics

INFO = EngineInfo("m", "/m", 100, 64, 8, None, GenerationDefaults((1, 2), 0.0), "plan", 100, 16)
STATS = EngineStats(2, 1, 30, 10, 60, 0, 100, 40, 7, 500)


def meter_of(*replicas: int) -> tuple[Meter, Metrics]:
    metrics = Metrics()
    meter = Meter(metrics)
    for replica in replicas:
        meter.set_engine_info(INFO, replica)
    return meter, metrics


def test_counters_of_engines_and_their_successors_add_up_however_often_they_are_read() -> None:
    meter, metrics = meter_of(0, 1)
    meter.record_stats(STATS, 0)
    meter.settle(num_queued=0)
    meter.record_stats(replace(STATS, steps=9), 0)
    meter.record_stats(STATS, 1)
    meter.settle(num_queued=0)
    meter.settle(num_queued=0)
    assert metrics.steps.values == {"": 16}
    assert metrics.replica_steps.values == {"0": 9, "1": 7}
    meter.record_stats(replace(STATS, steps=12), 0)
    meter.set_engine_info(INFO, 0)
    meter.record_stats(replace(STATS, steps=1), 0)
    meter.forget_replica(1)
    meter.settle(num_queued=0)
    assert metrics.steps.values == {"": 12 + 1 + 7}, "what was not read before an engine's end counts"
    assert metrics.kv_blocks.values == {"held": 30, "cached": 10, "free": 60}
    assert metrics.running.values == {"": 2}


def test_steps_are_counted_when_they_are_read_and_are_not_kept_without_bound() -> None:
    meter, metrics = meter_of(0)
    for _ in range(MAX_STEPS_KEPT + 3):
        meter.record_step(StepRecord(0.0, 0.1, 0.5, 0.1, StepTrace(4, 2)))
    assert metrics.tokens_a_step.total == 4 * MAX_STEPS_KEPT
    meter.settle(num_queued=0)
    assert metrics.tokens_a_step.total == 4 * (MAX_STEPS_KEPT + 3)


def test_waiting_requests_are_those_that_are_queued_when_the_metrics_are_read() -> None:
    meter, metrics = meter_of(0)
    meter.record_stats(STATS, 0)
    for num_queued in (3, 0):  # the last may have left the queue without being sent
        meter.settle(num_queued)
        assert metrics.fleet_queued.values == {"": num_queued}
        assert metrics.waiting.values == {"": STATS.num_waiting + num_queued}
