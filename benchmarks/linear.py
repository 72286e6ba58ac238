"""How near the native linear map comes to the machine's ceilings, for each kind of weight and number of tokens.

    python benchmarks/linear.py         (writes results/<machine>/linear.json)

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

from ceilings import measure
from penstock.kernels.linear.weight import GROUP, Weight
from penstock.kernels.ops import make_ops
from penstock.memory import WeightKind
from report import save

SHAPES = [(6144, 1024), (1024, 3072)]
# Each with the units that may do it, the best first.
KINDS: list[tuple[str, WeightKind, torch.dtype, tuple[str, ...]]] = [
    ("float32", "float", torch.float32, ("float32",)),
    ("bfloat16", "float", torch.bfloat16, ("bfloat16", "int16", "float32")),
    ("int8", "int8", torch.bfloat16, ("int8", "float32")),
    ("int6", "int6", torch.bfloat16, ("int8", "float32")),
    ("int4", "int4", torch.bfloat16, ("int8", "float32")),
]
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
CPU = torch.device("cpu")
OPS = make_ops(CPU)
COPIED_BYTES = 150 << 20


def packed(rows: int, columns: int, kind: WeightKind, dtype: torch.dtype) -> Weight:
    weight = OPS.new_weight(rows, columns, kind, gated=False, dtype=dtype, device=CPU)
    if kind == "float":
        weight.load(0, torch.randn(rows, columns) * 0.05)
    elif kind == "int8":
        weight.load_int8(0, torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.full((rows,), 0.01))
    elif kind == "int6":
        values = torch.randint(-31, 32, (rows, columns), dtype=torch.int8)
        weight.load_int6(0, values, torch.full((rows, columns // GROUP), 0.01))
    else:
        groups = columns // GROUP
        values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        weight.load_int4(0, values, torch.full((rows, groups), 0.01), torch.full((rows, groups), 8, dtype=torch.uint8))
    return weight


def seconds(weights: list[Weight], x: torch.Tensor) -> float:
    """For one product, on average over all weights."""
    start = time.perf_counter()
    for weight in weights:
        weight.linear(x, None, torch.bfloat16)
    return (time.perf_counter() - start) / len(weights)


def main() -> int:
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    rates: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    for _ in range(3):
        ceilings = measure(threads)
        for name, rate in ceilings.items():
            rates[name].append(rate / 1e9)
        for rows, columns in SHAPES:
            for name, kind, dtype, units in KINDS:
                unit = next(unit for unit in units if unit in ceilings)
                weights = [packed(rows, columns, kind, dtype)]
                while sum(weight.nbytes for weight in weights) < COPIED_BYTES:
                    weights.append(packed(rows, columns, kind, dtype))
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
