"""The instruction sets agree on bits, and tiles (AMX, here emulated) pass the tests of linear maps and attention.

`scripts/sanitize` runs all the kernels' tests on each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import native

# Digests of products: of the kinds of weights that all instruction sets have, and of bfloat16 where it is multiplied;
# of draws from logits, and of disentangled attention.
DIGESTS = """
import hashlib, json, sys
import numpy as np
import torch
from penstock import native
from penstock.kernels.ops import native_ops
from penstock.kernels.sampling import Controls
from penstock.config.weight_formats import FLOAT, FORMATS
from penstock.kernels.arrays import array_of
from tests.kernels.test_disentangled import LENGTHS, batch_of, random_options
from tests.kernels.weights import random_integers
library, digests = native.library(), {}
ops, cpu = native_ops(library), torch.device("cpu")
for name in sys.argv[1:]:
    if not library.choose(name):
        continue
    torch.manual_seed(0)
    for rows, columns, tokens in ((70, 300, 37), (1, 1, 1), (200, 64, 13), (33, 129, 70)):
        x, floats = torch.randn(tokens, columns), torch.randn(rows, columns)
        kinds = [(FLOAT, torch.float32), (FLOAT, torch.float16)]
        kinds += [(FORMATS["fp8"], torch.float32)]
        kinds += [(format, torch.bfloat16) for format in FORMATS.values() if format.name not in ("float", "fp8")]
        in_pairs = [(format, torch.bfloat16) for format in (FLOAT, FORMATS["fp8"])]
        for format, dtype in kinds + in_pairs * library.multiplies_bfloat16:
            precise = tokens == 13
            weight = ops.new_weight(
                rows, columns, format, gated=False, dtype=dtype, device=cpu, precise=precise
            )
            weight.load(0, array_of(floats) if format is FLOAT else random_integers(rows, columns, format))
            y = weight.linear(x, None, torch.float32)
            group = "all" if (format, dtype) in kinds else "tiles" if name.startswith("amx") else "pairs"
            digests.setdefault(group, {}).setdefault(name, []).append(hashlib.md5(y.numpy().tobytes()).hexdigest())
    x = torch.cat([torch.ones(5, 300), -torch.ones(5, 300)])  # in int8: the largest, as are the weights
    for format in FORMATS.values():
        for value in (0, 2**format.bits - 1) * (format.name not in ("float", "fp8")):
            weight = ops.new_weight(70, 300, format, gated=False, dtype=torch.bfloat16, device=cpu)
            content = random_integers(70, 300, format)
            content.values[:] = value
            weight.load(0, content)
            y = weight.linear(x, None, torch.float32)
            digests["all"][name].append(hashlib.md5(y.numpy().tobytes()).hexdigest())
    logits, random = torch.randn(300, 5003) * 3, np.random.default_rng(0)
    choices = [(0, 0.5, 1, 1.3), (0, 3, 700), (1, 0.4, 0.95), (0, 0.02), (1, 0.7)]
    controls = Controls(*(random.choice(some, 300) for some in choices), random.random(300))
    qkv, options = torch.randn(sum(LENGTHS), 180), random_options(20, "keys and queries", 300)
    attended = ops.disentangled_attention(qkv, options, batch_of(ops, LENGTHS)).numpy()
    drawn = (ops.sample(logits, controls), *ops.topk_logprobs(logits, 20), attended)
    digests.setdefault("draws", {})[name] = [hashlib.md5(part.tobytes()).hexdigest() for part in drawn]
print(json.dumps(digests))
"""
FOLDER = Path(__file__).parent
TILED = {"test_linear.py": "float-torch.bfloat16 or _bfloat16", "test_native_attention.py": "not instruction_set"}
"""Tests of what tiles alone multiply: of bfloat16 weights, and of attention."""
NAMES = (*native.INSTRUCTION_SETS, *native.EMULATED_SETS)
needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built here")
nested = pytest.mark.skipif("PENSTOCK_ISA" in os.environ, reason="one instruction set is being tested")


@needs_native
@nested
def test_products_of_integers_and_wide_floats_and_draws_are_the_same_bits_on_every_instruction_set() -> None:
    run = subprocess.run(
        [sys.executable, "-c", DIGESTS, *NAMES], capture_output=True, text=True, timeout=120, check=True
    )
    digests = json.loads(run.stdout)
    if len(digests["all"]) < 2:
        pytest.skip(f"the library was built with {', '.join(digests['all'])} alone")
    for group in digests.values():  # all sets, and the sets with tiles: on a machine with AMX, it and its emulation
        assert len({tuple(digest) for digest in group.values()}) == 1, digests


@needs_native
@nested
@pytest.mark.parametrize("file", TILED)
def test_products_by_emulated_tiles_pass_the_tests(file: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", TILED[file], str(FOLDER / file)],
        env={**os.environ, "PENSTOCK_ISA": "amx_emulated"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "this machine does not have it" in run.stdout:
        pytest.skip("this machine has no AVX-512, or the library was built without amx_emulated")
    assert run.returncode == 0, run.stdout
