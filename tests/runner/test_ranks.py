"""Ranks as processes of their own: the same answers, and what happens when one of them ends."""

import contextlib
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from safetensors.torch import load_file

from penstock import SamplingParams
from penstock.api.request import Adapter, Request
from penstock.checkpoint.adapters.folder import read_adapter
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config.engine_config import EngineConfig, Role
from penstock.config.ranks import RANK_PROCESS, RankJoin, Ranks, Rendezvous
from penstock.config.settings import Settings
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore, ModelRunner
from penstock.errors import AdapterError, ConfigError, DeviceLostError
from penstock.fleet.cluster.secure import make_rendezvous
from penstock.frontend.input_processor import InputProcessor
from penstock.kernels.ranks.reference import lost_peers
from penstock.runner import ranks
from penstock.runner.fingerprint import arithmetic
from penstock.runner.rank_adapters import AdapterChange, FollowedAdapters
from penstock.runner.rank_network import PlanSink, PlanSource
from penstock.runner.ranks import RankedRunner, RankOrder, RankStep
from penstock.runner.runners import start_runner
from penstock.system.host import start_child
from penstock.text.tokenizer import Tokenizer
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_random, write_tiny_llama, write_tokenizer
from tests.support.controls import answer, requests_of
from tests.support.families import DELTA, MAMBA, QWEN_EXPERTS, SHAPE
from tests.support.needs import needs_native
from tests.support.waiting import alive, wait_until

OVERRIDES = '{"rope_theta": 100.0}'


def engine(
    folder: Path, size: int, rendezvous: Rendezvous | None = None, role: Role = "any", **options: Any
) -> tuple[EngineCore, list[int]]:
    """An engine of so many ranks, and the process ids of those that it has started.

    Args:
        rendezvous: of ranks on several nodes.
    """
    pids: list[int] = []

    def make_runner(checkpoint: Checkpoint, settings: Settings) -> ModelRunner:
        runner = start_runner(checkpoint, settings)
        pids.extend(runner.pids if isinstance(runner, RankedRunner) else ())
        return runner

    defaults = {"threads": size, "kv_cache_memory": "2MiB", "block_size": 4, "seed": 0}
    config = EngineConfig.from_options(model=str(folder), tensor_parallel_size=size, **(defaults | options))
    return build_engine(replace(config, rendezvous=rendezvous, role=role), make_runner=make_runner), pids


def settings_of(folder: Path, size: int) -> Settings:
    found: list[Settings] = []

    def note(checkpoint: Checkpoint, settings: Settings) -> ModelRunner:
        found.append(settings)
        raise InterruptedError

    config = EngineConfig.from_options(model=str(folder), tensor_parallel_size=size, kv_cache_memory="2MiB")
    with pytest.raises(InterruptedError):
        build_engine(config, make_runner=note)
    return found[0]


@contextlib.contextmanager
def second_node(rendezvous: Rendezvous, model: Path, size: int) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """The ranks of another node, as their host there starts them."""
    joins = [RankJoin(rendezvous, str(model), Ranks(rank, size)) for rank in rendezvous.of_node(1, size)]
    started = [start_child(RANK_PROCESS, join.encode()) for join in joins]
    try:
        yield started
    finally:
        for process in started:
            process.communicate(timeout=30)


def questions(core: EngineCore) -> list[Request]:
    """Under every control of sampling, and of a prompt with its log-probabilities."""
    processor = InputProcessor(Tokenizer.from_path(Path(core.info.model_path)), core.info)
    told = SamplingParams(max_tokens=3, prompt_logprobs=2, seed=1)
    return [*requests_of(processor), processor.make_request("a lazy dog", told, request_id="told", arrival=0.0)]


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


@pytest.mark.parametrize("shared", [pytest.param(True, marks=needs_native), False], ids=["shared memory", "gloo"])
def test_two_processes_answer_as_one_does_until_one_is_killed(
    tiny_llama: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, others = engine(tiny_llama, 1)
    assert not others
    wanted = answer(core, questions(core))
    core.close()
    if not shared:  # as where there is no native library: plans and columns go through torch.distributed
        monkeypatch.setattr(ranks, "shared_file", lambda library, size: None)
    core, (other,) = engine(tiny_llama, 2)
    asked = questions(core)
    assert answer(core, asked) == wanted
    for request in asked:
        core.add_request(request)
    core.step()
    os.kill(other, signal.SIGKILL)
    with pytest.raises(DeviceLostError):
        finish(core)
    assert not alive(other)
    core.close()


def test_ranks_of_several_nodes_answer_as_one_process_does_until_one_is_killed(tmp_path: Path) -> None:
    folder, size = write_tiny_llama(tmp_path, num_key_value_heads=4), 4
    core, _ = engine(folder, 1)
    wanted = answer(core, questions(core))
    core.close()
    rendezvous = make_rendezvous("127.0.0.1", num_nodes=2)
    with second_node(rendezvous, folder, size) as elsewhere:
        core, here = engine(folder, size, rendezvous)
        assert (len(here), len(elsewhere)) == (size // 2 - 1, size // 2)
        asked = questions(core)
        assert answer(core, asked) == wanted
        for request in asked:
            core.add_request(request)
        core.step()
        elsewhere[0].kill()
        with pytest.raises(DeviceLostError):
            finish(core)
        core.close()
    assert not any(alive(pid) for pid in here)


def test_an_idle_engine_that_ends_has_the_ranks_of_other_nodes_end(tiny_llama: Path) -> None:
    rendezvous = make_rendezvous("127.0.0.1", num_nodes=2)
    with second_node(rendezvous, tiny_llama, 2) as (other,):
        core, _ = engine(tiny_llama, 2, rendezvous)
        core.close()
        assert other.wait(30) == 0


def test_a_node_that_would_compute_otherwise_is_refused(tiny_llama: Path) -> None:
    """It says why, and ends."""
    rendezvous = make_rendezvous("127.0.0.1", num_nodes=2)
    checkpoint = open_checkpoint(str(tiny_llama))
    settings = settings_of(tiny_llama, 2)
    other = RankOrder(settings, "of another instruction set")
    with pytest.raises(ConfigError, match="rank 1 would not compute as rank 0 does"):
        other.launch(RankJoin(rendezvous, str(tiny_llama), Ranks(1, 2)), checkpoint)
    own = RankOrder(settings, arithmetic(checkpoint, settings))
    launch = own.launch(RankJoin(rendezvous, str(tiny_llama), Ranks(1, 2)), checkpoint)
    assert (launch.ranks, launch.shared, launch.settings.device) == (Ranks(1, 2), None, "cpu")


def test_only_who_has_the_engine_s_key_is_told_its_plans() -> None:
    rendezvous = make_rendezvous("127.0.0.1", num_nodes=2)
    source = PlanSource(rendezvous)
    try:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        stranger = PlanSink(replace(rendezvous, ranks_public=public, ranks_secret=secret))
        assert not source.await_rank()
        assert not source.await_rank()
        sink = PlanSink(rendezvous)
        wait_until(source.await_rank)
        source.broadcast(b"a plan")
        assert sink.broadcast(b"") == b"a plan"
        sink.close()
        with pytest.raises(DeviceLostError, match="a rank of the engine is gone"):
            wait_until(lambda: source.broadcast(b"another") == b"")
        stranger.close()
    finally:
        source.close()


def test_ranks_end_with_the_engine(tiny_llama: Path) -> None:
    core, (other,) = engine(tiny_llama, 2)
    assert alive(other)
    core.close()
    assert not alive(other)


@needs_native
def test_a_step_ends_for_all_ranks_at_one_time_where_blocks_are_moved(tiny_llama: Path, tmp_path: Path) -> None:
    """Else a block would be written to a file before a rank has stored its keys of the last layer."""
    core, _ = engine(tiny_llama, 2, kv_disk=f"{tmp_path}/kv:8MiB", max_num_batched_tokens=256)
    runner = core._runner
    assert isinstance(runner, RankedRunner)
    group = runner._group
    assert group is not None
    told: list[bytes] = []

    class Watched:
        collective, abort, close = group.collective, group.abort, group.close

        def broadcast(self, message: bytes) -> bytes:
            told.append(message)
            return group.broadcast(message)

    runner._group = Watched()
    core.add_request(questions(core)[0])
    core.step()
    step, end = told
    assert isinstance(pickle.loads(step), RankStep)
    assert end == b""
    core.close()


@needs_native
def test_adapters_of_ranks_add_the_same_bits_and_make_room_for_others(tiny_llama: Path, tmp_path: Path) -> None:
    """There is room for one of them, so each time the other one is asked for the first one leaves."""
    paths = [write_adapter(tmp_path / name, tiny_llama, seed=seed) for seed, name in enumerate("ab", 1)]
    room = sum(tensor.nbytes for tensor in load_file(paths[0] / "adapter_model.safetensors").values())
    answers = []
    for size in (1, 2):
        core, _ = engine(tiny_llama, size, adapter_memory=room)
        assert core.info.adaptable is not None
        chosen = [read_adapter(path.name, path, core.info.adaptable).adapter for path in paths]
        answers.append(
            [
                answer(core, [replace(question, adapter=adapter) for question in questions(core)])
                for adapter in (None, *chosen, chosen[0])
            ]
        )
        core.close()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1] == answers[0][3] != answers[0][2]


@needs_native
@pytest.mark.parametrize(
    ("family", "shape", "targets"),
    [
        ("Qwen3_5", DELTA, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
        ("Qwen3Next", DELTA | QWEN_EXPERTS, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("GraniteMoeHybrid", MAMBA | {"mamba_n_groups": 2}, ("in_proj", "out_proj")),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, ("in_proj", "out_proj")),
    ],
)
def test_adapters_of_recurrent_layers_add_the_same_bits_on_two_ranks(
    family: str, shape: dict[str, Any], targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    write_random(base, family, **SHAPE | shape | {"vocab_size": 320})
    write_tokenizer(base, 320)
    path = write_adapter(tmp_path / "a", base, targets=targets)
    answers = []
    for size in (1, 2):
        core, _ = engine(base, size, adapter_memory="1MiB")
        assert core.info.adaptable is not None
        adapter = read_adapter("a", str(path), core.info.adaptable).adapter
        answers.append(
            [
                answer(core, [replace(question, adapter=used) for question in questions(core)])
                for used in (None, adapter)
            ]
        )
        core.close()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_a_rank_reads_an_adapter_beside_a_step_and_waits_for_it_in_the_first_that_needs_it() -> None:
    done: list[str] = []
    may_read = threading.Event()

    class Runner:
        def load_adapter(self, adapter: Adapter) -> None:
            may_read.wait(10)
            if adapter.name == "damaged":
                raise AdapterError("damaged")
            done.append(f"read {adapter.name}")

        def drop_adapter(self, adapter: Adapter) -> None:
            done.append(f"dropped {adapter.name}")

    good, damaged = (Adapter(name, f"/{name}", name, 1) for name in ("good", "damaged"))
    adapters = FollowedAdapters(Runner())
    adapters.follow([AdapterChange(one, is_loaded=True) for one in (good, damaged)], [])
    assert not done
    may_read.set()
    adapters.follow([], [None, good])
    assert done == ["read good"]
    with pytest.raises(AdapterError):
        adapters.follow([], [damaged])
    adapters.follow([AdapterChange(damaged, is_loaded=False)], [good])
    adapters.follow([AdapterChange(good, is_loaded=False)], [])
    assert done == ["read good", "dropped damaged", "dropped good"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter_memory": "1MiB"}, "adapters do not work with nodes_per_engine"),
        ({"kv_disk": "/tmp/kv"}, "kv_disk does not work with nodes_per_engine"),
        ({"role": "prefill"}, "prefill_engines do not work with nodes_per_engine"),
    ],
    ids=str,
)
def test_what_concerns_one_machine_is_refused_where_ranks_are_on_several_nodes(
    tiny_llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(tiny_llama, 2, make_rendezvous("127.0.0.1", num_nodes=2), **options)


def test_overrides_of_the_config_reach_every_rank_and_are_part_of_its_arithmetic(tiny_llama: Path) -> None:
    plain, given = (open_checkpoint(str(tiny_llama), hf_overrides=one) for one in (None, OVERRIDES))
    settings = settings_of(tiny_llama, 1)
    assert arithmetic(plain, settings) != arithmetic(given, settings)
    answers = []
    for options in ({}, {"hf_overrides": OVERRIDES}):
        for size in (1, 2):
            core, _ = engine(tiny_llama, size, **options)
            answers.append(answer(core, questions(core)))
            core.close()
    assert answers[0] == answers[1] != answers[2] == answers[3]


def test_overrides_and_revision_reach_the_ranks_of_other_nodes(tiny_llama: Path) -> None:
    join = RankJoin(make_rendezvous("127.0.0.1", num_nodes=2), "some/repo", Ranks(1, 2), "v1", OVERRIDES)
    assert RankJoin.decode(join.encode()) == join
    checkpoint = open_checkpoint(str(tiny_llama), hf_overrides=OVERRIDES)
    settings = settings_of(tiny_llama, 2)
    assert RankOrder(settings, arithmetic(checkpoint, settings)).launch(join, checkpoint).hf_overrides == OVERRIDES


def test_a_connection_that_a_rank_has_closed_is_told_as_its_end_and_other_errors_as_they_are() -> None:
    with pytest.raises(DeviceLostError, match="another rank"), lost_peers():
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shape"), lost_peers():
        raise RuntimeError("the shape is wrong")
