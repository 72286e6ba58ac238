"""The memory plan holds what the engine really takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import native
from penstock.config import EngineConfig, resolve
from penstock.memory import GIB, Machine, Matrix, ModelFacts
from penstock.weight_formats import FLOAT
from tests.checkpoints import write_tiny_llama

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from penstock import native
from penstock.kernels.ops import make_ops
from penstock.models.decoder import Decoder
from penstock.models.registry import read_config
from penstock.quantization.base import WeightFactory
from penstock.quantization.methods import make_method
from tests.stepping import settings_for

class Counting(WeightFactory):
    made = []
    def _new_weight(self, *args, **options):
        return self.count(super()._new_weight(*args, **options))
    def empty(self, *args, **options):
        return self.count(super().empty(*args, **options))
    def count(self, weight):
        self.made.append(weight)
        return weight

taken, cpu = [], torch.device("cpu")
ops = make_ops(cpu)
for dtype in ("float32", "bfloat16", "float16"):
    for kind in ("none", "int8", "int4"):
        checkpoint, settings = settings_for(Path(sys.argv[1]), dtype=dtype, quantization=kind)
        Counting.made = []
        weights = Counting(make_method(settings.quantization, None, ops), ops, getattr(torch, dtype), cpu)
        model = Decoder(read_config(checkpoint), 8, weights)
        taken.append([dtype, kind, settings.memory.weights, sum(weight.nbytes for weight in weights.made)])
print(json.dumps([native.library() is not None, taken]))
"""


@pytest.mark.parametrize("isa", ["", "reference"])
def test_weights_are_planned_with_the_bytes_that_the_kernels_hold(tmp_path: Path, isa: str) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4096, "num_attention_heads": 8}
    folder = write_tiny_llama(tmp_path, head_dim=64, **shape)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    environment = os.environ | {"PENSTOCK_ISA": isa}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    is_native, taken = json.loads(run.stdout)
    assert is_native == (isa == "" and native.library() is not None)
    for dtype, kind, planned, held in taken:
        assert held <= planned * 1.01, (dtype, kind)
        assert planned <= held * 1.03, (dtype, kind)


SMALL = ModelFacts(  # SmolLM2-135M
    name="135M",
    dtype="bfloat16",
    num_parameters=134_515_008,
    max_position=8192,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    matrices=(Matrix("layers", 106_168_320 // 576, 576, FLOAT), Matrix("model.embed_tokens", 49152, 576, FLOAT)),
)


@pytest.mark.parametrize(
    ("memory", "options", "words"),
    [
        (64 * GIB, {"max_num_seqs": 8}, r"max_num_seqs \(8\) sequences of max_model_len \(8,192\) tokens"),
        (64 * GIB, {}, r"the default's 8.00 GiB \(kv_cache_memory\)"),
        (4 * GIB, {}, "60 % of the memory that is left"),
        (4 * GIB, {"kv_cache_memory": "1GiB"}, "kv_cache_memory"),
    ],
)
def test_the_plan_says_what_limits_the_cache(memory: int, options: dict[str, object], words: str) -> None:
    machine = Machine(device="cpu", cores=2, memory=memory, native=True)
    plan = resolve(EngineConfig.from_options(**options), SMALL, machine).memory
    assert re.search(f"limited by {words}", plan.describe())


def test_no_more_is_planned_than_all_sequences_can_fill() -> None:
    machine = Machine(device="cpu", cores=2, memory=64 * GIB, native=True)
    plan = resolve(EngineConfig.from_options(max_num_seqs=8), SMALL, machine).memory
    assert plan.num_tokens == 8 * 8192
    on_gpu = resolve(EngineConfig.from_options(max_num_seqs=8), SMALL, Machine("cuda", cores=2, memory=64 * GIB))
    assert on_gpu.memory.num_tokens == 8 * 8192
