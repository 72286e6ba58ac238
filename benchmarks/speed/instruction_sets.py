"""The linear map of one thread on each instruction set that the library and this machine have, and by the reference.

    python -m benchmarks.speed.instruction_sets       (writes results/<machine>/instruction_sets.json)

CPU milliseconds for a weight of [3072, 1024] and 1, 32 or 512 tokens, over as many copies as take 24 MB: less than
caches of servers hold, more than those of a core. Medians of rounds, in which the sets take turns. Needs a library of
several sets: `cmake -S . -B build/sets -DPENSTOCK_SETS=all -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$PWD/build/sets && cmake
--build build/sets`, then PENSTOCK_LIBRARY=build/sets/libpenstock.so.
"""

import statistics
import sys
import time
from collections import defaultdict

import torch

from benchmarks.report import save
from benchmarks.speed.linear import packed
from penstock import native
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.kernels.linear.weight import Weight
from penstock.kernels.ops import native_ops
from penstock.kernels.reference_ops import over_tensors, reference_ops

ROWS, COLUMNS = 3072, 1024
COPIED_BYTES = 24 << 20
KINDS: dict[str, tuple[WeightFormat, torch.dtype]] = {
    **{name: (FORMATS[name], torch.bfloat16) for name in ("q4_0", "q4_k", "q8_0", "int8", "int4")},
    "bfloat16": (FLOAT, torch.bfloat16),
    "float32": (FLOAT, torch.float32),
}
TOKENS = (1, 32, 512)
ROUNDS = 5


def milliseconds(weights: list[Weight], x: torch.Tensor) -> float:
    """CPU time of a product, on average over all weights."""
    begin = time.process_time()
    for weight in weights:
        weight.linear(x, None, torch.bfloat16)
    return 1e3 * (time.process_time() - begin) / len(weights)


def main() -> int:
    library = native.library()
    assert library is not None
    native.set_num_threads(1)
    torch.set_num_threads(1)
    sets = [name for name in native.INSTRUCTION_SETS if library.choose(name)]
    results: dict[str, dict[str, float]] = {}
    for kind, (format, dtype) in KINDS.items():
        weights: dict[str, list[Weight]] = {}
        for name in sets:
            library.choose(name)  # packed as this set multiplies them
            weights[name] = packed(ROWS, COLUMNS, format, dtype, over_tensors(native_ops(library)), COPIED_BYTES)
        weights["reference"] = packed(ROWS, COLUMNS, format, dtype, reference_ops(), COPIED_BYTES)[:2]
        for tokens in TOKENS:
            x, taken = torch.randn(tokens, COLUMNS).to(dtype), defaultdict(list)
            for _ in range(ROUNDS + 1):
                for name, copies in weights.items():
                    library.choose(name if name in sets else "")
                    taken[name].append(milliseconds(copies, x))
            row = {name: round(statistics.median(all_[1:]), 4) for name, all_ in taken.items()}
            results[f"{kind} {tokens}"] = row
            print(f"{kind:10} {tokens:3} tokens ", *(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    save("instruction_sets", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
