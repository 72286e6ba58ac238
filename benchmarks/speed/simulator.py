"""The simulator beside real engines: are its times theirs, and how fast is it?

    python -m benchmarks.speed.simulator accuracy --model FOLDER_OR_GGUF [--rounds 3]     (bar: every error <= 10 %)
    python -m benchmarks.speed.simulator speed  (bars: 50,000 engine steps a second of a core; 1,000 engines, an hour
                                                 of traffic, in ten minutes)

Accuracy: each round calibrates, lets a real engine in this process serve two traces that it was not calibrated on
(chats with system prompts; bursts of Mooncake's schema), and simulates both. All times are seconds of the CPU that the
process got, with one thread: the engine, its arrivals and the calibration go by that clock, so that other work on the
machine counts less. The round with the least noise, by the calibration's own error, is held to the bar; all are kept.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import report, save
from penstock.api.request import FinishReason
from penstock.config.engine_config import EngineConfig
from penstock.config.memory import LayerGroup, MemoryPlan
from penstock.config.settings import Settings
from penstock.diagnose.calibrate import MeasuredEngine, make_request, measure
from penstock.simulator.chats import Chats
from penstock.simulator.costs import MeasuredCosts, fit, median_error
from penstock.simulator.histogram import Histogram
from penstock.simulator.simulation import Fleet, Outcome, Simulation
from penstock.simulator.summary import quantile
from penstock.simulator.traces import read_trace
from penstock.simulator.workload import Arrival, Workload

BAR = 10.0
"""Per cent."""
STEPS_A_SECOND = 50_000
MINUTES_AN_HOUR = 10.0
HOUR_CHATS = 35.0
"""Chats that begin a second with 1,000 engines; three requests each."""


class CpuClock:
    """Seconds of this process, and those that were skipped because there was nothing to do."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped

    def skip_to(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self())


def serve(engine: MeasuredEngine, workload: Workload, clock: CpuClock) -> Outcome:
    """What a real engine makes of a workload."""
    core, outcome = engine.core, Outcome()
    source = workload.arrivals()
    coming: list[Arrival] = []
    begin = clock()
    following = next(source, None)
    open_requests: dict[str, tuple[Arrival, list[float]]] = {}
    while following is not None or coming or core.has_work:
        while following is not None and (not coming or following.time <= min(waiting.time for waiting in coming)):
            coming.append(following)
            following = next(source, None)
        if not core.has_work:
            clock.skip_to(begin + min(waiting.time for waiting in coming))
        now = clock() - begin
        for arrival in sorted((waiting for waiting in coming if waiting.time <= now), key=lambda one: one.time):
            coming.remove(arrival)
            open_requests[arrival.name] = (arrival, [])
            core.add_request(make_request(arrival.name, arrival.prompt, len(arrival.answer), begin + arrival.time))
        outputs = core.step()
        now = clock() - begin
        for output in outputs:
            arrival, times = open_requests[output.request_id]
            if times:
                outcome.latencies.add(now - times[-1])
            else:
                outcome.cached_tokens += output.num_cached_tokens
            arrival.answer[len(times)] = output.token_ids[0]
            times.append(now)
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH, output
                outcome.first_tokens.append(times[0] - arrival.time)
                outcome.ends.append(now - arrival.time)
                outcome.prompt_tokens += len(arrival.prompt)
                outcome.answer_tokens += len(times)
                after = arrival.follow(now) if arrival.follow is not None else None
                if after is not None:
                    coming.append(after)
    outcome.seconds = clock() - begin
    return outcome


def bursts(path: Path, scale: float, requests: int = 48) -> None:
    """Write a trace of Mooncake's schema: requests in bursts, of which most begin with one of three known texts."""
    rng = random.Random(11)
    with path.open("w") as file:
        now = 0.0
        for number in range(requests):
            if number % 4 == 0:
                now += rng.expovariate(1 / (4 * scale))
            shared = rng.random() < 0.8
            length = 512 + rng.randrange(20, 200) if shared else rng.randrange(40, 300)
            ids = [rng.randrange(3), 100 + number] if shared else [100 + number]
            line = {"timestamp": round(1000 * now), "input_length": length, "output_length": rng.randrange(4, 60)}
            file.write(json.dumps({**line, "hash_ids": ids}) + "\n")


def figures(outcome: Outcome) -> dict[str, float]:
    """Mean and P90 of what users wait for."""
    found: dict[str, float] = {}
    for name, values in (("ttft", outcome.first_tokens), ("e2e", outcome.ends)):
        found |= {f"{name} mean": sum(values) / len(values), f"{name} p90": quantile(values, 0.9)}
    latencies: Histogram = outcome.latencies
    return found | {"itl mean": latencies.mean, "itl p90": latencies.quantile(0.9)}


def accuracy(model: str | None, rounds: int, seconds: float) -> int:
    clock = CpuClock()
    options = {"threads": 1, "kv_cache_memory": "300MiB", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    engine = MeasuredEngine(EngineConfig.from_options(model=model, max_model_len=2048, **options), clock)
    measure(engine, seconds / 2, clock)  # warm
    tried = []
    vocab = engine.core.info.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bursts.jsonl"
        for _ in range(rounds):
            steps = measure(engine, seconds, clock)
            a_token = fit(steps).base[-1][1] / 256
            second = 0.2 / (150 * a_token)  # of chats, by which the engine is busy for some half of its time
            chats = Chats(
                chats_per_second=second,
                seconds=40 / second,
                turns=3,
                system_prompts=3,
                system_tokens=96,
                question_tokens=48,
                answer_tokens=24,
                think_seconds=400 * a_token,
                vocab_size=vocab,
            )
            bursts(path, scale=200 * a_token)
            workloads: dict[str, Workload] = {"chats": chats, "bursts": read_trace(path, vocab_size=vocab)}
            real = {}
            for name, workload in workloads.items():
                engine.core.restart(engine.core.settings)
                real[name] = serve(engine, workload, clock)
            engine.core.restart(engine.core.settings)
            steps += measure(engine, seconds, clock)
            costs = fit(steps)
            row: dict[str, Any] = {"noise": round(median_error(costs, steps), 4)}
            for name, workload in workloads.items():
                simulated = Simulation(Fleet(engine.core.settings, costs), workload).run()
                assert len(simulated.ends) == len(real[name].ends)
                ours, theirs = figures(simulated), figures(real[name])
                row[name] = {key: round(ours[key] / theirs[key] - 1, 4) for key in theirs}
                row[f"{name} real"] = {key: round(value, 4) for key, value in theirs.items()}
                row[f"{name} cached"] = (simulated.cached_tokens, real[name].cached_tokens)
            print(json.dumps(row), flush=True)
            tried.append(row)
            quietest = min(tried, key=lambda row: row["noise"])
            save(f"simulator_accuracy_{Path(model).stem if model else 'demo'}", {"rounds": tried, "quietest": quietest})
    engine.close()
    errors = {f"{name}: {key}": 100 * abs(quietest[name][key]) for name in workloads for key in quietest[name]}
    print(f"quietest of {rounds} rounds, errors in %:")
    return report("", {name: (error, BAR) for name, error in errors.items()}, keep=False)


def pretended_engine() -> tuple[Settings, MeasuredCosts]:
    """About what qwen3-0.6b takes on eight cores."""
    groups = (LayerGroup((), None, 3000),)
    settings = Settings(
        model_name="pretended",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        quantization=None,
        packed_cache=None,
        device="cpu",
        threads=8,
        seed=None,
        max_model_len=8192,
        enable_prefix_caching=True,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        policy="fair",
        admission=None,
        speculation=None,
        memory=MemoryPlan(0, 0, 0, groups, 32),
    )
    return settings, MeasuredCosts(((1, 0.0061), (16, 0.0073), (64, 0.011), (512, 0.041)), 3e-8, 4e-9, 1.1e-5)


def speed(seconds: float) -> int:
    """Steps a second of CPU, and an hour of a thousand engines."""
    rows: dict[str, tuple[float, float | None]] = {}
    for busy, rate in (("a little", 0.08), ("a third", 0.16), ("two thirds", 0.4)):
        chats = Chats(chats_per_second=4 * rate, seconds=600)
        outcome, cpu = timed(4, chats)
        rows[f"us of CPU an engine step; 4 engines, busy {busy}"] = (
            1e6 * cpu / outcome.num_steps,
            1e6 / STEPS_A_SECOND,
        )
        rows[f"  tokens a step; busy {busy}"] = (
            sum(engine.tokens for engine in outcome.engines) / outcome.num_steps,
            None,
        )
        share = sum(engine.seconds for engine in outcome.engines) / outcome.seconds / 4
        rows[f"  per cent busy; {busy}"] = (100 * share, None)
    chats = Chats(chats_per_second=HOUR_CHATS, seconds=seconds, system_prompts=500)
    outcome, cpu = timed(1000, chats)
    rows["minutes of CPU: 1,000 engines, an hour"] = (cpu / 60 * 3600 / seconds, MINUTES_AN_HOUR)
    rows["  requests a second"] = (len(outcome.ends) / seconds, None)
    rows["  million engine steps"] = (outcome.num_steps / 1e6, None)
    rows["  seconds simulated"] = (seconds, None)
    return report("simulator_speed", rows)


def timed(num_engines: int, chats: Chats) -> tuple[Outcome, float]:
    began = time.process_time()
    outcome = Simulation(Fleet(*pretended_engine(), num_engines), chats).run()
    return outcome, time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "speed"))
    parser.add_argument("--model", help="of the real engine; default: the demo model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of CPU, for each calibration")
    parser.add_argument("--simulated", type=float, default=3600.0, help="of traffic for 1,000 engines")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        return speed(arguments.simulated)
    return accuracy(arguments.model, arguments.rounds, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
