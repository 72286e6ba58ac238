"""What sampling costs of a decode step at batch 64, for rows of each kind.

    python benchmarks/sampling.py MODEL [--quantization int4]        (writes results/<machine>/sampling.json)

MODEL is of qwen3-0.6b's shape, with a vocabulary of 151,936 (`/work/shared/peers/make_model.py` writes one). Bars, of
the whole step: 5 % for greedy rows, 15 % for top-p; ours for rows with every control and 20 log-probabilities: 25 %.
The step is measured with greedy rows, at a context of about 100 tokens; the sampler on logits with a wide nucleus, of
some 13,000 tokens for a top_p of 0.95, which is the hard case, and with 500 tokens before. Medians of rounds that
measure both in turn, so that what else the machine does falls on both.
"""

import argparse
import random
import statistics
import sys
import time
from array import array
from functools import partial
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.core.plan import SampleBatch
from penstock.engine.core import EngineCore
from penstock.engine.intake import Intake
from penstock.kernels.ops import make_ops
from penstock.request import Request
from penstock.sampling.sampler import sample
from penstock.sampling_params import ResolvedParams, SamplingParams
from report import report

BATCH, HISTORY, ROUNDS = 64, 500, 12
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


def batch_of(params: ResolvedParams, vocab: int) -> SampleBatch:
    rng = random.Random(0)
    histories = [array("i", (rng.randrange(vocab) for _ in range(HISTORY))) for _ in range(BATCH)]
    return SampleBatch(
        rows=list(range(BATCH)),
        params=[params] * BATCH,
        indices=list(range(BATCH)),
        positions=[HISTORY] * BATCH,
        histories=histories,
        prompt_lens=[HISTORY // 2] * BATCH,
        sequence_ids=list(range(BATCH)),
    )


def requests_of(intake: Intake, num_steps: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    return [intake.accept([i + 3] * 90, params, request_id=str(i), arrival=0.0) for i in range(BATCH)]


def milliseconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="int4", help="int4, the fastest step here, unless told otherwise")
    args = parser.parse_args()
    options = {"kv_cache_memory": "2GiB", "max_num_seqs": BATCH, "max_model_len": 1024}
    core = EngineCore(EngineConfig.from_options(model=args.model, quantization=args.quantization, **options))
    intake, vocab = Intake(None, core.info), core.info.vocab_size
    resolved = {
        name: intake.accept([1], SamplingParams(seed=1, **c), request_id="", arrival=0.0).params
        for name, (c, _) in ROWS.items()
    }
    batches = {name: batch_of(params, vocab) for name, params in resolved.items()}
    logits = torch.randn(BATCH, vocab, generator=torch.Generator().manual_seed(0)) * 3
    for request in requests_of(intake, ROUNDS + 40):
        core.add(request)
    while len(core.step()) < BATCH:
        pass
    steps: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    ops = make_ops(torch.device("cpu"))
    with torch.inference_mode():
        for batch in batches.values():
            sample(ops, logits, batch)
        for _ in range(ROUNDS):
            steps.append(milliseconds(core.step))
            for name, batch in batches.items():
                times[name].append(milliseconds(partial(sample, ops, logits, batch)))
    core.close()
    step = statistics.median(steps)
    print(f"a step at batch {BATCH}, {args.quantization}: {step:.1f} ms")
    rows = {
        f"sampling for a batch of {BATCH}, {name} rows, ms; the bar is {share:g} % of a step": (
            statistics.median(times[name]),
            share / 100 * step,
        )
        for name, (_, share) in ROWS.items()
    }
    return report("sampling", rows)


if __name__ == "__main__":
    sys.exit(main())
