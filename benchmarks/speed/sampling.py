"""What sampling costs of a decode step at batch 64, for rows of each kind.

    python -m benchmarks.speed.sampling MODEL [--quantization int4]        (writes results/<machine>/sampling.json)
    python -m benchmarks.speed.sampling                                    (writes results/<machine>/penalties.json)

MODEL is of qwen3-0.6b's shape, with a vocabulary of 151,936 (`/work/shared/peers/make_model.py` writes one). Bars, of
the whole step: 5 % for greedy rows, 15 % for top-p; ours for rows with every control and 20 log-probabilities: 25 %.
The step is measured with greedy rows, at a context of about 100 tokens; the sampler on logits with a wide nucleus, of
some 13,000 tokens for a top_p of 0.95, which is the hard case, and with 500 tokens before. Medians of rounds that
measure both in turn, so that what else the machine does falls on both.

Without MODEL: what a repetition penalty adds to greedy rows, by the length of their histories, in CPU time of one
thread. Tokens are drawn by Zipf's law, so that a history of 8,000 has about 1,700 different ones, as a text has; and
uniformly, where nearly all differ, which no text does.
"""

import argparse
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from penstock import native
from penstock.api.request import Request
from penstock.api.sampling_params import ResolvedParams, SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.core.plan import SampleBatch, SampledSequence
from penstock.engine.build import build_engine
from penstock.frontend.input_processor import InputProcessor
from penstock.kernels.reference_ops import over_tensors
from penstock.kernels.tables import make_ops
from penstock.sampling.sampler import Sampler

BATCH, HISTORY, ROUNDS = 64, 500, 12
OPS = over_tensors(make_ops("cpu"))
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 100,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": {100: 1.5, 2000: -100.0},
    "bad_token_ids": [7, 8, 9],
    "logprobs": 20,
}
ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "greedy": ({"temperature": 0.0}, 5.0),
    "top-p": ({"temperature": 1.0, "top_p": 0.95}, 15.0),
    "all controls": (EVERYTHING, 25.0),
}


VOCAB = 151_936
KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "as in texts": lambda rng, count: np.minimum(rng.zipf(1.2, count) - 1, VOCAB - 1),
    "nearly all different": lambda rng, count: rng.integers(0, VOCAB, count),
}


def batch_of(params: ResolvedParams, histories: "list[array[int]]") -> SampleBatch:
    return SampleBatch(
        [SampledSequence(slot, slot, params, HISTORY // 2, history) for slot, history in enumerate(histories)],
        list(range(len(histories))),
        [len(history) for history in histories],
    )


def random_batch(params: ResolvedParams, vocab: int) -> SampleBatch:
    rng = random.Random(0)
    return batch_of(params, [array("i", (rng.randrange(vocab) for _ in range(HISTORY))) for _ in range(BATCH)])


def penalty_cost(kind: str, num_rows: int, length: int) -> float:
    """Milliseconds of CPU time that a step takes longer by a repetition penalty, the median."""
    rng = np.random.default_rng(0)
    logits = torch.randn(num_rows, VOCAB)
    histories = [array("i", KINDS[kind](rng, length).tolist()) for _ in range(num_rows)]
    greedy = ResolvedParams(1, 0.0, 0, 1.0, 0.0, 0, 1 << 20, 0, (), None)
    batches = [batch_of(params, histories) for params in (greedy, replace(greedy, repetition_penalty=1.05))]
    samplers, times = [Sampler(OPS, num_rows) for _ in batches], []
    for _ in range(2 * ROUNDS):
        for history in histories:
            history.append(int(KINDS[kind](rng, 1)[0]))
        seconds = []
        for sampler, batch in zip(samplers, batches, strict=True):
            batch.positions = [len(history) for history in histories]
            start = time.process_time()
            sampler.sample(logits, batch)
            seconds.append(time.process_time() - start)
        times.append(seconds[1] - seconds[0])
    return statistics.median(times[1:]) * 1e3  # the first counts whole histories


def penalties() -> int:
    """Measure what a repetition penalty costs."""
    native.set_num_threads(1)
    rows: dict[str, tuple[float, float | None]] = {}
    with torch.inference_mode():
        for kind in KINDS:
            for num_rows in (64, 256):
                for length in (500, 8_000, 32_000):
                    bar = 1.0 if num_rows == 64 and kind == "as in texts" else None
                    name = f"a repetition penalty for {num_rows} rows of {length:,} tokens, {kind}, ms"
                    rows[name] = (penalty_cost(kind, num_rows, length), bar)
    return report("penalties", rows)


def requests_of(input_processor: InputProcessor, num_steps: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    return [input_processor.make_request([i + 3] * 90, params, request_id=str(i), arrival=0.0) for i in range(BATCH)]


def milliseconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization", default="int4", help="int4, the fastest step here, unless told otherwise")
    args = parser.parse_args()
    if args.model is None:
        return penalties()
    options = {"kv_cache_memory": "2GiB", "max_num_seqs": BATCH, "max_model_len": 1024}
    core = build_engine(EngineConfig.from_options(model=args.model, quantization=args.quantization, **options))
    input_processor, vocab = InputProcessor(None, core.info), core.info.vocab_size
    resolved = {
        name: input_processor.make_request([1], SamplingParams(seed=1, **c), request_id="", arrival=0.0).params
        for name, (c, _) in ROWS.items()
    }
    samplers = {name: Sampler(OPS, BATCH) for name in ROWS}
    batches = {name: random_batch(params, vocab) for name, params in resolved.items()}
    logits = torch.randn(BATCH, vocab, generator=torch.Generator().manual_seed(0)) * 3
    for request in requests_of(input_processor, ROUNDS + 40):
        core.add_request(request)
    while len(core.step()) < BATCH:
        pass
    steps: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    with torch.inference_mode():
        for name, batch in batches.items():
            samplers[name].sample(logits, batch)
        for _ in range(ROUNDS):
            steps.append(milliseconds(core.step))
            for name, batch in batches.items():
                times[name].append(milliseconds(partial(samplers[name].sample, logits, batch)))
    core.close()
    step = statistics.median(steps)
    print(f"a step at batch {BATCH}, {args.quantization}: {step:.1f} ms")
    rows = {
        f"sampling for a batch of {BATCH}, {name} rows, ms; at most {share:g} % of a step": (
            statistics.median(times[name]),
            share / 100 * step,
        )
        for name, (_, share) in ROWS.items()
    }
    return report("sampling", rows)


if __name__ == "__main__":
    sys.exit(main())
