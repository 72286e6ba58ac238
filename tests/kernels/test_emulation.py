"""The library of another processor, which an emulator runs (`scripts/aarch64`), gives the bits of this machine's."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels import test_instruction_sets, test_native_attention

pytestmark = [
    pytest.mark.skipif("PENSTOCK_EMULATED" not in os.environ, reason="scripts/aarch64 runs it"),
    pytest.mark.timeout(3600),
]
RECURRENT = """
import hashlib, json, sys, torch
from penstock import native
from tests.kernels.test_recurrent import MIXERS, Texts, native_table
outs = lambda mixer: torch.cat(Texts(mixer, native_table(), [40, 3], torch.float32).whole()).numpy().tobytes()
of_mixers = lambda: {name: hashlib.md5(outs(mixer)).hexdigest() for name, mixer in MIXERS.items()}
print(json.dumps({name: of_mixers() for name in sys.argv[1:] if native.library().choose(name)}))
"""
X86_SETS = ("avx2", "avx512_bf16", "amx_emulated")


def digests(script: str, *sets: str, emulated: bool) -> dict[str, dict[str, object]]:
    """What the script prints for these sets, with the emulated library or this machine's."""
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_ISA"}
    if not emulated:
        environment["PENSTOCK_LIBRARY"] = os.environ.get("PENSTOCK_MACHINE_LIBRARY", "")
    command = [sys.executable, "-c", script, *sets]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert run.returncode == 0, run.stderr
    printed: dict[str, dict[str, object]] = json.loads(run.stdout)
    return printed


def test_products_and_draws_have_the_bits_of_this_machine() -> None:
    isa = os.environ["PENSTOCK_ISA"]
    emulated = digests(test_instruction_sets.DIGESTS, isa, emulated=True)
    own = digests(test_instruction_sets.DIGESTS, *X86_SETS, emulated=False)
    for group, of_sets in emulated.items():
        if group in own:  # pairs of bfloat16: where this machine multiplies them
            assert of_sets[isa] == next(iter(own[group].values())), group


@pytest.mark.parametrize("script", [test_native_attention.DIGESTS, RECURRENT], ids=["attention", "recurrent"])
def test_attention_and_recurrent_layers_have_the_bits_of_this_machine(script: str) -> None:
    isa = os.environ["PENSTOCK_ISA"]
    assert digests(script, isa, emulated=True)[isa] == digests(script, "avx2", emulated=False)["avx2"]
