"""The memory plan holds what the engine really takes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import native
from penstock.config.byte_counts import GIB
from penstock.config.engine_config import EngineConfig
from penstock.config.machine import Machine
from penstock.config.memory import LayerGroup, most_branches
from penstock.config.model_facts import ActivationSizes, KVSpec, LayerFacts, Matrix, ModelFacts, StateSpec
from penstock.config.settings import resolve
from penstock.config.weight_formats import FLOAT
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.sequence import Sequence
from penstock.engine.memory_line import memory_line
from penstock.errors import ConfigError
from tests.core.fakes import make_request
from tests.support.checkpoints import write_tiny_llama
from tests.support.needs import needs_torch

PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from penstock import native
from penstock.kernels.tables import make_ops
from penstock.models.decoder import Decoder
from penstock.models.registry import read_spec
from penstock.quantization.base import WeightFactory
from penstock.quantization.methods import make_method
from tests.support.stepping import settings_for

class Counting(WeightFactory):
    counted = []
    def _new_weight(self, *args, **options):
        return self.count(super()._new_weight(*args, **options))
    def empty(self, *args, **options):
        return self.count(super().empty(*args, **options))
    def _tensor(self, *args):
        return self.count(super()._tensor(*args))
    def count(self, weight):
        self.counted.append(weight)
        return weight

taken, cpu = [], torch.device("cpu")
for dtype in ("float32", "bfloat16", "float16"):
    for kind in ("none", "int8", "int4"):
        options = dict(dtype=dtype, quantization=kind, max_memory=sys.argv[2], max_model_len=64, max_num_seqs=1)
        checkpoint, settings = settings_for(Path(sys.argv[1]), **options)
        ops = make_ops(cpu, widened_weights=settings.widened_weights)
        Counting.counted = []
        method, stored = make_method(settings.quantization, None, ops), torch.float16 if dtype == "float16" else None
        weights = Counting(method, ops, getattr(torch, settings.dtype), cpu, stored=stored)
        model = Decoder(read_spec(checkpoint), 8, weights)
        held = sum(weight.nbytes for weight in weights.counted)
        taken.append([dtype, kind, settings.memory.weights, held, settings.widened_weights])
print(json.dumps([native.library() is not None, taken]))
"""


@needs_torch
@pytest.mark.parametrize(("isa", "memory"), [("", "8GiB"), ("reference", "8GiB"), ("reference", "56MiB")])
def test_weights_are_planned_with_the_bytes_that_the_kernels_hold(tmp_path: Path, isa: str, memory: str) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4096, "num_attention_heads": 8}
    folder = write_tiny_llama(tmp_path, head_dim=64, **shape)
    command = [sys.executable, "-c", PROGRAM, str(folder), memory]
    environment = os.environ | {"PENSTOCK_ISA": isa}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    is_native, taken = json.loads(run.stdout)
    assert is_native == (isa == "" and native.library() is not None)
    for dtype, kind, planned, held, widened in taken:
        assert widened == (not is_native and memory == "8GiB" and (kind != "none" or dtype == "float16"))
        assert held <= planned * 1.01, (dtype, kind)
        assert planned <= held * 1.03, (dtype, kind)


def layer(window: int | None) -> LayerFacts:
    return LayerFacts(KVSpec(3, 64, window), (ActivationSizes(1920, 1920, 576), ActivationSizes(1536, 4608, 1536)))


SMALL = ModelFacts(  # SmolLM2-135M
    name="135M",
    dtype="bfloat16",
    num_parameters=134_515_008,
    max_position=8192,
    vocab_size=49152,
    hidden_size=576,
    layers=(layer(None),) * 30,
    rotary_dim=64,
    matrices=(Matrix("layers", 106_168_320 // 576, 576, FLOAT), Matrix("model.embed_tokens", 49152, 576, FLOAT)),
)


@pytest.mark.parametrize(
    ("memory", "options", "words"),
    [
        (64 * GIB, {"max_num_seqs": 8}, "all that --max-num-seqs 8 of --max-model-len 8192 can use"),
        (64 * GIB, {}, "--kv-cache-memory"),
        (4 * GIB, {}, "60 % of what is left; --kv-cache-memory"),
        (4 * GIB, {"kv_cache_memory": "1GiB"}, "--kv-cache-memory"),
    ],
)
def test_the_plan_says_what_limits_the_cache(memory: int, options: dict[str, object], words: str) -> None:
    machine = Machine(device="cpu", cores=2, memory=memory, native=True)
    plan = resolve(EngineConfig.from_options(**options), SMALL, machine).memory
    assert f"tokens, filled on demand; {words})" in memory_line(plan)


def test_no_more_is_planned_than_all_sequences_can_fill() -> None:
    machine = Machine(device="cpu", cores=2, memory=64 * GIB, native=True)
    plan = resolve(EngineConfig.from_options(max_num_seqs=8), SMALL, machine).memory
    assert plan.num_tokens == 8 * 8192
    on_gpu = resolve(EngineConfig.from_options(max_num_seqs=8), SMALL, Machine("cuda", cores=2, memory=64 * GIB))
    assert on_gpu.memory.num_tokens == 8 * 8192


@given(
    windows=st.lists(st.sampled_from([None, 64, 512, 4096]), min_size=1, max_size=12),
    memory=st.integers(2**21, 2**33),
    max_num_seqs=st.integers(1, 64),
    budget=st.integers(64, 4096),
)
def test_pools_take_what_they_may_and_each_window_has_room(
    windows: list[int | None], memory: int, max_num_seqs: int, budget: int
) -> None:
    machine = Machine(device="cpu", cores=2, memory=2**36, native=True)
    options = {"kv_cache_memory": memory, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max(64, budget)}
    facts = replace(SMALL, layers=tuple(map(layer, windows)))
    plan = resolve(EngineConfig.from_options(**options), facts, machine).memory
    layer_block = 2 * 3 * 64 * 2 * plan.block_size
    taken = sum(len(group.layers) * group.num_blocks * layer_block for group in plan.groups)
    assert taken == plan.kv_cache <= memory < taken + 2 * len(windows) * layer_block
    assert sorted(layer for group in plan.groups for layer in group.layers) == list(range(len(windows)))
    main, *bounded = plan.groups
    for group in bounded:
        assert group.window is not None
        assert main.window is None or main.window > group.window
        seen = max_num_seqs * (group.window // plan.block_size + 2) + max(64, budget) // plan.block_size
        assert group.num_blocks == main.num_blocks or group.num_blocks >= seen


def test_small_windows_leave_most_of_the_memory_to_the_layers_that_see_all() -> None:
    machine = Machine(device="cpu", cores=2, memory=64 * GIB, native=True)
    options = EngineConfig.from_options(max_num_seqs=8, kv_cache_memory="1GiB")
    plans = [
        resolve(options, replace(SMALL, layers=tuple(map(layer, windows))), machine).memory
        for windows in ((None,) * 24, ((512,) * 5 + (None,)) * 4)
    ]
    assert plans[1].num_tokens > 2 * plans[0].num_tokens
    assert "in layers with a window of 512" in memory_line(plans[1])


RECURRENT = LayerFacts(StateSpec(((3, 6144), (16, 4, 128, 32))), (ActivationSizes(1920, 1920, 576),))
HYBRID = replace(SMALL, layers=(RECURRENT, RECURRENT, RECURRENT, layer(None)) * 6)
STATE = 18 * 4 * (3 * 6144 + 16 * 128 * 128)
MACHINE = Machine(device="cpu", cores=2, memory=64 * GIB, native=True)


def test_each_sequence_has_a_state_and_checkpoints_take_a_quarter_of_what_keys_take() -> None:
    plan = resolve(EngineConfig.from_options(max_num_seqs=8, kv_cache_memory="2GiB"), HYBRID, MACHINE).memory
    main, states = plan.groups
    assert (len(main.layers), len(states.layers)) == (6, 18)
    keys = main.num_blocks * plan.block_size * 6 * 2 * 3 * 64 * 2
    assert plan.kv_cache == keys + states.num_blocks * STATE <= 2 * GIB < plan.kv_cache + 2 * STATE
    assert 0.24 * keys <= (states.num_blocks - 8) * STATE <= 0.26 * keys + STATE
    assert states.checkpoint_every is not None
    assert states.num_blocks == 8 + -(-main.num_blocks // states.checkpoint_every)
    assert f" and {states.num_blocks} recurrent states" in memory_line(plan)
    assert plan.with_fewer_blocks(3).groups == (replace(main, num_blocks=3), states)


def test_fewer_sequences_run_by_default_where_their_states_would_fill_the_cache() -> None:
    for memory, expected in (("64MiB", 1), ("512MiB", 8), ("4GiB", 64)):
        settings = resolve(EngineConfig.from_options(kv_cache_memory=memory), HYBRID, MACHINE)
        assert settings.max_num_seqs == expected
        assert settings.max_num_seqs == 1 or settings.max_num_seqs * STATE <= settings.memory.kv_cache / 2
    with pytest.raises(ConfigError, match=r"no KV block .* lower max_num_seqs, max_model_len"):
        resolve(EngineConfig.from_options(kv_cache_memory="64MiB", max_num_seqs=4), HYBRID, MACHINE)


def test_a_draft_model_that_has_states_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"the draft model 135M has recurrent layers.*attention layers only"):
        resolve(EngineConfig.from_options(speculative_model="other"), SMALL, MACHINE, HYBRID)


@pytest.mark.parametrize("memory", ["512MiB", "4GiB"])
def test_by_default_states_and_those_of_drafts_take_half_of_the_cache_at_most(memory: str) -> None:
    settings = resolve(EngineConfig.from_options(kv_cache_memory=memory, speculation="ngram"), HYBRID, MACHINE)
    live, plan = settings.max_num_seqs, settings.memory
    assert live > 1
    assert (live + most_branches(live, 16)) * STATE <= plan.kv_cache / 2


@pytest.mark.parametrize(("num_tokens", "branches"), [(16, 8), (2, 5)])
def test_states_that_take_in_drafts_are_planned_beside_the_live_ones(num_tokens: int, branches: int) -> None:
    options = {"max_num_seqs": 8, "kv_cache_memory": "2GiB", "speculation": "ngram"}
    config = EngineConfig.from_options(**options, num_speculative_tokens=num_tokens)
    plan = resolve(config, HYBRID, MACHINE).memory
    main, states = plan.groups
    assert states.checkpoint_every is not None
    assert states.num_blocks == 8 + branches + -(-main.num_blocks // states.checkpoint_every)
    assert plan.kv_cache <= 2 * GIB


def test_a_model_of_recurrent_layers_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent layers alone"):
        resolve(EngineConfig(), replace(HYBRID, layers=(RECURRENT,) * 4), MACHINE)


@pytest.mark.parametrize("window", [512, 1024])
def test_a_windowed_model_takes_no_more_memory_a_token_than_its_windows_need(window: int) -> None:
    """Gemma 3's layers: of six, one sees all and five a window."""
    windows = ((window,) * 5 + (None,)) * 4
    facts = replace(SMALL, max_position=32768, layers=tuple(map(layer, windows)))
    options = EngineConfig.from_options(max_num_seqs=1, enable_prefix_caching=True)
    plan = resolve(options, facts, MACHINE).memory
    token = 2 * 3 * 64 * 2
    needed = token * (4 * 32768 + 20 * window)
    assert plan.num_tokens == 32768
    held = sum(
        len(group.layers) * token * plan.block_size * (most_held(group, plan.block_size, 32768))
        for group in plan.groups
    )
    assert held <= 1.05 * needed


def most_held(group: LayerGroup, block_size: int, length: int) -> int:
    """Blocks of a group that one sequence holds at most between two steps."""
    groups = (CacheGroup(length // block_size),) * (group.window is not None) + (CacheGroup(4096, group.window),)
    kv = KVManager(groups, block_size, 1)
    seq = Sequence(make_request("r", [1] * length), 0, 0)
    assert kv.admit(seq, 0) is None
    most = 0
    for end in range(512, length + 1, 512):
        kv.extend_bounded([seq], [512])
        seq.num_computed = end
        kv.commit(seq)
        most = max(most, kv.pools[-1].num_held)
    return most
