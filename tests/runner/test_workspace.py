"""The memory plan's workspace holds what a step really takes: the peak of a large one, measured in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import native
from tests.support.checkpoints import write_tiny_llama

MIB = 2**20
ALLOCATOR = 4 * MIB
"""What malloc, a first step's code pages and the like may take beside."""

PROGRAM = """
import ctypes, json, sys
from array import array
from pathlib import Path
from penstock.config.engine_config import EngineConfig
from penstock.config.settings import resolve
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.models.registry import read_facts
from penstock.runner.machine import detect_machine
from penstock.runner.device_runner import DeviceRunner
from penstock.system.host import trim_heaps
from tests.support.stepping import kept, plan_of

def status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
options = json.loads(sys.argv[2])
settings = resolve(EngineConfig.from_options(**options), read_facts(checkpoint), detect_machine("cpu"))
runner = DeviceRunner(checkpoint, settings)
size, length = settings.memory.block_size, settings.max_model_len
def step(parts, sampled):
    tables = [array("i", range(100 * row, 100 * row + -(-(start + count) // size))) for row, (start, count) in parts]
    chunks = [(start, [7] * count) for _, (start, count) in parts]
    return runner.execute(plan_of(chunks, tables, range(sampled), [100] * sampled))

step([(0, (0, 1))], 1)  # code, tables
for layer in kept(runner._cache):
    layer.copy_blocks([(0, block) for block in range(settings.memory.num_blocks)])
idle = runner._forward._layers._idle  # part of the workspace
for memory in idle:
    ctypes.memset(memory.ctypes.data, 0, memory.nbytes)
trim_heaps()  # as an engine does: what loading has left would hold a part of the step's memory
before = status("VmRSS") - sum(memory.nbytes for memory in idle)
Path("/proc/self/clear_refs").write_text("5")
budget, rows = settings.max_num_batched_tokens, settings.max_num_seqs
step([(0, (length - budget, budget))], 1)
step([(row % 2, (length - 1 - row, 1)) for row in range(rows)], rows)
print(json.dumps([status("VmHWM") - before, settings.memory.workspace]))
"""


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's to tell")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_step_stays_within_the_planned_workspace(tmp_path: Path, dtype: str) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192, "max_position_embeddings": 3000}
    folder = write_tiny_llama(tmp_path, num_hidden_layers=1, **shape)
    options = {"dtype": dtype, "max_num_batched_tokens": 2048, "max_num_seqs": 64, "kv_cache_memory": "8MiB"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    peak, workspace = json.loads(run.stdout)
    assert peak < workspace + ALLOCATOR
    # A third of the plan are copies of logits, for rows with every control of sampling: this step has none.
    assert peak > workspace / 7, "the plan wastes what could hold keys and values"
