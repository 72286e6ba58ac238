"""How near a mixture of experts comes to the machine's ceilings, in the shape of Qwen3-30B-A3B: 8 of 128 experts.

    python -m benchmarks.speed.experts [FORMAT ...]     (writes results/<machine>/experts.json)

Each figure is the larger of two shares: bytes of the weights of those experts that the tokens meet, a second, over the
measured read bandwidth, and operations a second over the measured rate of the unit that does them. Medians of rounds,
each of which measures the ceilings anew.
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
from penstock.config.feed_forward import Routing
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.kernels.arrays import array_of
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.reference_ops import over_tensors
from penstock.kernels.tables import make_ops
from tests.kernels.weights import random_integers

HIDDEN, INNER, ROUTING = 2048, 768, Routing(128, 8, renormalize=True)
TOKENS = (1, 4, 16, 64, 256, 1024)
CPU = "cpu"
OPS = over_tensors(make_ops(CPU))


def packed(rows: int, columns: int, format: WeightFormat, *, gated: bool) -> Weight:
    weight = OPS.new_weight(rows, columns, format, gated=gated, dtype=torch.bfloat16, device=CPU)
    floats = array_of(torch.randn(rows, columns) * 0.05)
    weight.load(0, floats if format is FLOAT else random_integers(rows, columns, format))
    return weight


def main() -> int:
    threads = len(os.sched_getaffinity(0))
    native.set_num_threads(threads)
    shares: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for name in sys.argv[1:] or ["int4", "q4_k", "float"]:
        format = FORMATS[name]
        gate_up: list[LinearMap] = [packed(2 * INNER, HIDDEN, format, gated=True) for _ in range(ROUTING.num_experts)]
        down = [packed(HIDDEN, INNER, format, gated=False) for _ in range(ROUTING.num_experts)]
        experts = OPS.new_experts(gate_up, down, None, None)
        bytes_each = experts.nbytes / ROUTING.num_experts
        for _ in range(3):
            ceilings = measure(threads)
            unit = next(unit for unit in ("bfloat16" if format is FLOAT else "int8", "float32") if unit in ceilings)
            rates["read"].append(ceilings["read"] / 1e9)
            rates[unit].append(ceilings[unit] / 1e9)
            for tokens in TOKENS:
                steps = []
                for _ in range(max(4, 32 // tokens)):  # other experts each time
                    x = torch.randn(tokens, HIDDEN).bfloat16()
                    ids, weights = OPS.route(torch.randn(tokens, ROUTING.num_experts), ROUTING, None)
                    start = time.perf_counter()
                    experts.mix(x, ids, weights, None, None)
                    taken = time.perf_counter() - start
                    read = bytes_each * len(set(ids.flatten().tolist())) / taken / ceilings["read"]
                    done = 6 * tokens * ROUTING.top_k * HIDDEN * INNER / taken / ceilings[unit]
                    steps.append(max(read, done))
                shares[f"{name} {tokens} tokens"].append(statistics.median(steps))
    result = {
        "ceilings, GB/s or G operations/s": {name: round(statistics.median(rate), 1) for name, rate in rates.items()},
        "share of the nearer ceiling": {name: round(statistics.median(share), 2) for name, share in shares.items()},
    }
    save("experts", result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
