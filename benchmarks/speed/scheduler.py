"""What the core costs: the scheduler's Python per sequence and step, matching in the prefix tree, filling the pool.

    python -m benchmarks.speed.scheduler  (bars: 3 µs a running sequence and step; 2 ms a 32k-token match; flat pool)

Flat: a block of 100,000 costs at most twice one of 1,000, as the larger tree no longer fits the processor's caches.
Times are CPU time, so that what else the machine does hardly counts. Writes results/<machine>/scheduler.json.
Exits with 1 if a bar is missed.
"""

import gc
import statistics
import sys
import time
from array import array

from benchmarks.report import report
from penstock.api.request import Request
from penstock.api.sampling_params import ResolvedParams
from penstock.core.block_keys import block_keys
from penstock.core.fairness import QUEUE_POLICIES
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.plan import StepResult
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence

BLOCK_SIZE = 16


def make_request(number: int, prompt: tuple[int, ...], max_tokens: int) -> Request:
    params = ResolvedParams(1, 0.0, 0, 1.0, 0.0, 0, max_tokens, 0, (2,), None)
    return Request(str(number), prompt, params, arrival=0.0)


def microseconds_per_sequence_and_step(num_running: int, steps: int = 300) -> float:
    """Median over decode steps of schedule and update together, a running sequence."""
    kv = KVManager((CacheGroup(num_running * (16 + steps // BLOCK_SIZE)),), BLOCK_SIZE, num_running)
    queue = QUEUE_POLICIES["fair"]()
    scheduler = Scheduler(kv, queue, max_num_seqs=num_running, max_num_batched_tokens=64 * num_running)
    for i in range(num_running):
        prompt = tuple(range(1000 * i, 1000 * i + 100 + i % BLOCK_SIZE))
        scheduler.add_request(make_request(i, prompt, 2 * steps))
    times = []
    for _ in range(steps):
        start = time.process_time()
        plan = scheduler.schedule()
        scheduled = time.process_time()
        assert plan is not None
        result = StepResult([5] * len(plan.samples))
        resumed = time.process_time()
        scheduler.update(result)
        end = time.process_time()
        if len(plan.samples) == num_running == len(plan.forward.token_ids):
            times.append((scheduled - start + end - resumed) / num_running)
    assert len(times) > steps // 2
    return statistics.median(times) * 1e6


def milliseconds_to_match(num_tokens: int = 32_768) -> float:
    """Median time to find a long, fully cached prompt in the tree."""
    kv = KVManager((CacheGroup(num_tokens // BLOCK_SIZE + 1),), BLOCK_SIZE, 1)
    tokens = array("i", range(num_tokens))
    seq = Sequence(make_request(0, tuple(tokens), 1), 0, 0)
    assert kv.admit(seq, reserve=0) is None
    seq.num_computed = num_tokens
    kv.commit(seq)
    times = []
    for _ in range(50):
        start = time.process_time()
        path = kv.cache.match("", block_keys(tokens, (), BLOCK_SIZE, num_tokens // BLOCK_SIZE))
        times.append(time.process_time() - start)
        assert len(path) == num_tokens // BLOCK_SIZE
    return statistics.median(times) * 1e3


def microseconds_per_block(num_blocks: int, rounds: int = 5) -> float:
    """Median time a block to fill the pool with cached prompts, then to go round once more by evicting all of it."""
    times = []
    for _ in range(rounds):
        gc.collect()  # the tree of the round before, which would be charged to this one
        times.append(_fill_and_evict(num_blocks))
    return statistics.median(times)


def _fill_and_evict(num_blocks: int, blocks_per_request: int = 50) -> float:
    kv = KVManager((CacheGroup(num_blocks),), BLOCK_SIZE, 1)
    total, number = 0, 0
    length = blocks_per_request * BLOCK_SIZE
    start = time.process_time()
    while total < 2 * num_blocks:
        seq = Sequence(make_request(number, tuple(range(number * length, (number + 1) * length)), 1), 0, number)
        assert kv.admit(seq, reserve=0) is None
        seq.num_computed = length
        kv.commit(seq)
        kv.release(seq)
        total += blocks_per_request
        number += 1
    return (time.process_time() - start) / total * 1e6


def main() -> int:
    rows = {
        "schedule + update, µs a running sequence, 256 running": (microseconds_per_sequence_and_step(256), 3.0),
        "schedule + update, µs a running sequence, 1,024 running": (microseconds_per_sequence_and_step(1024), 3.0),
        "match a 32,768-token prompt, ms": (milliseconds_to_match(), 2.0),
    }
    small = microseconds_per_block(1_000)
    for num_blocks in (10_000, 100_000):
        rows[f"fill and evict {num_blocks:,} blocks, µs a block (1,000: {small:.2f})"] = (
            microseconds_per_block(num_blocks),
            2 * small,
        )
    return report("scheduler", rows)


if __name__ == "__main__":
    sys.exit(main())
