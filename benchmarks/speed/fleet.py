"""What a fleet of engines gains and costs: throughput, CPU of the server's process, takeover, and the router.

    python -m benchmarks.speed.fleet [--parts throughput,cost,takeover,router]
    python -m benchmarks.speed.fleet --parts weights --model FOLDER       (the shape of qwen3-0.6b, in bfloat16)

1. throughput: decode at batch 16 of the demo model, one engine of two threads against two engines of one, in turns.
2. cost: CPU time of the server's process a token over engines that compute nothing (`null_core.py`), 32 streams an
   engine: two engines over one, the least of the rounds.
3. takeover: seconds from an engine's SIGKILL to the first token of one of its streams on the other.
4. router: chats of several turns over shared system prompts, two engines with small caches: `prefix` against
   `round-robin`, hit rate and time to the first token.
5. weights: as throughput, with a model whose weights no cache holds: two engines read them twice a step. The bar is 0.9
   of the ratio that `roofline.py` allows by the ceilings of the machine (`ceilings.cpp`, two threads; half for each of
   two engines); seconds, so upside down.

Rounds alternate, and medians of the rounds' ratios are told, as other work shares the machine; its load is told, too.
Each part's rows are saved as it ends, in results/<machine>/fleet.json. Exits with 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from benchmarks.report import report
from benchmarks.speed.ceilings import measure
from benchmarks.speed.roofline import bound, widths
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.config.machine import Machine
from penstock.config.settings import resolve
from penstock.fleet.link import ENGINE_CORE, EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.models.registry import read_facts

NULL_CORE = "benchmarks.speed.null_core:build_null_engine"
BATCH, TOKENS = 16, 384
FEW_TOKENS = 24
"""Of a stream of the large model."""
POOL_BLOCKS, BLOCK = 256, 32
"""Of an engine in the router's part: two of them hold what the chats share and say once, but not twice."""
SYSTEMS, CHATS, TURNS = 16, 32, 6


@contextlib.asynccontextmanager
async def fleet(
    count: int, router: str = "prefix", core: str = ENGINE_CORE, **options: object
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig.from_options(**options)
    links = [EngineLink(config, core) for _ in range(count)]
    engine = await AsyncEngine.start(config, links, router=router)
    try:
        yield engine
    finally:
        await engine.close()


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 1200) for _ in range(length)]


async def run_streams(engine: AsyncEngine, count: int, tokens: int, tag: str) -> float:
    """Let so many streams of so many tokens end; the seconds from the first to the last."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def one(number: int) -> None:
        accepted = engine.accept_request(prompt_of(number, 8), params, request_id=f"{tag}-{number}")
        with engine.open([accepted], stream=True) as stream:
            async for _ in stream:
                pass

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    return time.perf_counter() - began


async def in_turns(rounds: int, tokens: int, **options: Any) -> tuple[list[float], float]:
    """Tokens a second of one engine of two threads and of two of one; how much longer the two take."""
    ratios, rates = [], []
    async with fleet(1, threads=2, **options) as whole, fleet(2, "least-loaded", threads=1, **options) as halves:
        for number in range(rounds + 1):
            seconds = {}
            for engine in (whole, halves) if number % 2 else (halves, whole):
                seconds[engine is halves] = await run_streams(engine, BATCH, tokens, f"t{number}")
            rates.append((BATCH * tokens / seconds[False], BATCH * tokens / seconds[True]))
            print(f"one engine of two threads {rates[-1][0]:,.0f} tokens/s, two of one {rates[-1][1]:,.0f}", flush=True)
            ratios.append(seconds[True] / seconds[False])
    return [statistics.median(rate) for rate in zip(*rates[1:], strict=True)], statistics.median(ratios[1:])


async def weights(rounds: int, model: str | None) -> dict[str, tuple[float, float | None]]:
    assert model is not None, "--parts weights needs --model"
    ceilings = {name: rate / 1e9 for name, rate in measure(2).items()}
    width = widths(ceilings)[0]
    whole, _ = bound(f"{BATCH}x8:{FEW_TOKENS}", width, ceilings)
    half, _ = bound(f"{BATCH // 2}x8:{FEW_TOKENS}", width, {name: rate / 2 for name, rate in ceilings.items()})
    median, ratio = await in_turns(rounds, FEW_TOKENS, model=model, max_model_len=128, kv_cache_memory="300MiB")
    allowed = whole / (2 * half)
    return {
        "0.6b, one engine of two threads, tokens/s": (median[0], None),
        "0.6b, two engines of one thread, tokens/s": (median[1], None),
        "0.6b, the roofline of one engine of two threads, tokens/s": (whole, None),
        "0.6b, the roofline of two engines of one thread, tokens/s": (2 * half, None),
        "0.6b, seconds of two engines / of one, that the roofline allows": (allowed, None),
        "0.6b, seconds of two engines / of one of two threads": (ratio, allowed / 0.9),
    }


async def throughput(rounds: int) -> dict[str, tuple[float, float | None]]:
    median, ratio = await in_turns(rounds, TOKENS)
    return {
        "decode at batch 16, one engine of two threads, tokens/s": (median[0], None),
        "decode at batch 16, two engines of one thread, tokens/s": (median[1], None),
        "seconds of two engines / of one of two threads": (ratio, 1 / 0.95),
    }


async def cost(rounds: int) -> dict[str, tuple[float, float | None]]:
    streams, tokens = 32, 256
    used: dict[int, list[float]] = {1: [], 2: []}
    async with fleet(1, core=NULL_CORE) as one, fleet(2, "least-loaded", NULL_CORE) as two:
        for number in range(rounds + 1):
            for count, engine in ((1, one), (2, two)):
                before = time.process_time()
                await run_streams(engine, count * streams, tokens, f"c{number}")
                used[count].append((time.process_time() - before) / (count * streams * tokens) * 1e6)
            print(f"one engine {used[1][-1]:.2f} µs a token, two {used[2][-1]:.2f}")
    least = {count: min(times[1:]) for count, times in used.items()}  # what else runs takes caches, and adds to it
    return {
        "CPU of the server a token, one engine, µs": (least[1], None),
        "CPU of the server a token, two engines, µs": (least[2], None),
        "CPU a token of two engines over one, µs": (least[2] - least[1], 3.0),
    }


async def takeover(kills: int) -> dict[str, tuple[float, float | None]]:
    seconds = []
    params = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    async with fleet(2, "least-loaded", threads=1) as engine:
        for number in range(kills):
            seconds.append(await kill_once(engine, params, number))
            print(f"kill {number}: {seconds[-1]:.3f} s", flush=True)
    return {
        f"SIGKILL to the first token on another engine, median of {kills}, s": (statistics.median(seconds), 0.5),
        "the same, worst, s": (max(seconds), None),
    }


async def kill_once(engine: AsyncEngine, params: SamplingParams, number: int) -> float:
    """Eight streams, four at each engine; kill one, and wait for a token of what it had."""
    names = [f"k{number}-{i}" for i in range(8)]
    streams = {}
    for i, name in enumerate(names):
        streams[name] = engine.open([engine.accept_request(prompt_of(i, 40), params, request_id=name)], stream=True)
    for stream in streams.values():  # until none is under suspicion
        while len(stream.snapshot()[0].outputs[0].token_ids) < 20:
            await stream.__anext__()

    def replica(name: str) -> int | None:
        one = engine.open_requests.find(name)
        return None if one is None else one.replica

    victim = replica(names[0])
    assert victim is not None
    mine = [streams[name] for name in names if replica(name) == victim]
    assert 0 < len(mine) < len(names)
    began = time.perf_counter()
    os.kill(engine.fleet.replicas[victim].pid, signal.SIGKILL)
    while replica(names[0]) == victim:
        await asyncio.sleep(0.001)
    for stream in mine:
        await stream.__anext__()  # what had come before

    async def next_token(stream: AsyncIterator[object]) -> None:
        await stream.__anext__()

    waiting = [asyncio.ensure_future(next_token(stream)) for stream in mine]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    seconds = time.perf_counter() - began
    for task in waiting:
        task.cancel()
    for stream in streams.values():
        stream.abort()
    while engine.fleet.replicas[victim].down is not None:
        await asyncio.sleep(0.05)
    return seconds


async def chats(engine: AsyncEngine, tag: str) -> list[float]:
    """Chats over shared system prompts, all at one time, with pauses; seconds until each turn's first token."""
    times = []

    async def chat(number: int) -> None:
        own, history = random.Random(number), prompt_of(number % SYSTEMS, 512)
        for turn in range(TURNS):
            await asyncio.sleep(own.uniform(2.0, 8.0))
            history = history + [own.randrange(100, 1200) for _ in range(40)]
            params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
            began = time.perf_counter()
            accepted = engine.accept_request(history, params, request_id=f"{tag}-{number}-{turn}")
            with engine.open([accepted], stream=True) as stream:
                answer: list[int] = []
                async for deltas in stream:
                    if not answer:
                        times.append(time.perf_counter() - began)
                    answer += [token for _, delta in deltas for token in delta.token_ids]
            history = history + answer

    await asyncio.gather(*(chat(number) for number in range(CHATS)))
    return times


async def router(rounds: int) -> dict[str, tuple[float, float | None]]:
    hits: dict[str, list[float]] = {}
    medians: dict[str, list[float]] = {}
    pool = _pool_bytes()
    for number in range(rounds):
        names = ("round-robin", "least-loaded", "prefix")
        for name in names if number % 2 else names[::-1]:
            options: dict[str, Any] = {
                "threads": 1,
                "block_size": BLOCK,
                "kv_cache_memory": pool,
                "max_model_len": 1024,
            }
            async with fleet(2, name, **options) as engine:
                times = await chats(engine, name)
                counts = engine.metrics.prefix_hits.values[""], engine.metrics.prefix_queries.values[""]
            hits.setdefault(name, []).append(counts[0] / counts[1])
            medians.setdefault(name, []).append(statistics.median(times))
            print(f"{name:12} hit rate {hits[name][-1]:.2f}, first token {1e3 * medians[name][-1]:.1f} ms", flush=True)
    rows: dict[str, tuple[float, float | None]] = {}
    for name in hits:
        rows[f"hit rate, {name}"] = (statistics.median(hits[name]), None)
        rows[f"median time to first token, {name}, ms"] = (1e3 * statistics.median(medians[name]), None)
    pairs = [zip(of["round-robin"], of["prefix"], strict=True) for of in (hits, medians)]
    rows["hit rate of round robin / of prefix"] = (statistics.median(rr / ours for rr, ours in pairs[0]), 1 / 1.7)
    rows["time to first token of prefix / of round robin"] = (
        statistics.median(ours / rr for rr, ours in pairs[1]),
        0.75,
    )
    return rows


def _pool_bytes() -> int:
    """Bytes of a KV pool of POOL_BLOCKS blocks of the demo model."""
    machine = Machine("cpu", 1, 8 << 30, native=True)
    plan = resolve(EngineConfig.from_options(block_size=BLOCK), read_facts(open_checkpoint(None)), machine).memory
    return plan.kv_cache // plan.num_blocks * POOL_BLOCKS


PARTS = {"throughput": throughput, "cost": cost, "takeover": takeover, "router": router}
ROUNDS = {"throughput": 7, "cost": 12, "takeover": 20, "router": 3, "weights": 5}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, help="default: 7 of throughput, 12 of cost, 20 kills, 3 of the router")
    parser.add_argument("--model", help="of the part weights")
    args = parser.parse_args(argv)
    code, load = 0, os.getloadavg()[0]
    for part in args.parts.split(","):
        rounds = args.rounds or ROUNDS[part]
        rows = asyncio.run(weights(rounds, args.model) if part == "weights" else PARTS[part](rounds))
        rows[f"load of the machine before and after {part}"] = ((load + os.getloadavg()[0]) / 2, None)
        load = os.getloadavg()[0]
        code |= report("fleet", rows, beside=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
