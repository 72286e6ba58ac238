"""How near the native linear map comes to the machine's ceilings, for formats of weights and numbers of tokens.

    python -m benchmarks.speed.linear         (writes results/<machine>/linear.json)

Weights are qwen3-0.6b's largest, [6144, 1024] and [1024, 3072], in more copies than the caches hold. Each figure is the
larger of two shares: bytes of weights a second over the measured read bandwidth, and operations a second over the
measured rate of the unit that does them. Medians of rounds, each of which measures the ceilings anew.
"""

import json
import os
import statistics
import sys
import time
from collections import defaultdict

import torch

from benchmarks.report import save
from benchmarks.speed.ceilings import measure
from penstock import native
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.kernels.arrays import array_of
from penstock.kernels.linear.weight import Weight
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import over_tensors
from penstock.kernels.tables import make_ops
from tests.kernels.weights import random_integers

SHAPES = [(6144, 1024), (1024, 3072)]
INTEGERS = ("int8", "int6", "int5", "int4", "int4_zero", "q8_0", "q4_0", "q4_k", "q6_k")
# Each with the units that may do it, the best first.
KINDS: list[tuple[str, WeightFormat, torch.dtype, tuple[str, ...]]] = [
    ("float32", FLOAT, torch.float32, ("float32",)),
    ("bfloat16", FLOAT, torch.bfloat16, ("bfloat16", "int16", "float32")),
    *((name, FORMATS[name], torch.bfloat16, ("int8", "float32")) for name in INTEGERS),
]
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
CPU = "cpu"
OPS = over_tensors(make_ops(CPU))
COPIED_BYTES = 150 << 20


def packed(
    rows: int,
    columns: int,
    format: WeightFormat,
    dtype: torch.dtype,
    ops: Ops[torch.Tensor] = OPS,
    num_bytes: int = COPIED_BYTES,
) -> list[Weight]:
    """Copies of a weight, `num_bytes` in all."""
    content = array_of(torch.randn(rows, columns) * 0.05) if format is FLOAT else random_integers(rows, columns, format)
    weights: list[Weight] = []
    while sum(weight.nbytes for weight in weights) < num_bytes:
        weights.append(ops.new_weight(rows, columns, format, gated=False, dtype=dtype, device=CPU))
        weights[-1].load(0, content)
    return weights


def seconds(weights: list[Weight], x: torch.Tensor) -> float:
    """For one product, on average over all weights."""
    start = time.perf_counter()
    for weight in weights:
        weight.linear(x, None, torch.bfloat16)
    return (time.perf_counter() - start) / len(weights)


def main() -> int:
    threads = len(os.sched_getaffinity(0))
    native.set_num_threads(threads)
    rates: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    for _ in range(3):
        ceilings = measure(threads)
        for name, rate in ceilings.items():
            rates[name].append(rate / 1e9)
        for rows, columns in SHAPES:
            for name, format, dtype, units in KINDS:
                unit = next(unit for unit in units if unit in ceilings)
                weights = packed(rows, columns, format, dtype)
                for tokens in TOKENS:
                    x = torch.randn(tokens, columns).to(dtype)
                    taken = min(seconds(weights, x) for _ in range(3))
                    read = weights[0].nbytes / taken / ceilings["read"]
                    done = 2 * tokens * rows * columns / taken / ceilings[unit]
                    shares[f"{name} {rows}x{columns} {tokens} tokens"].append(max(read, done))
    result = {
        "ceilings, GB/s or G operations/s": {name: round(statistics.median(rate), 1) for name, rate in rates.items()},
        "share of the nearer ceiling": {name: round(statistics.median(share), 2) for name, share in shares.items()},
    }
    save("linear", result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
