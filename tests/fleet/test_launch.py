"""How the engines of a server share a machine."""

from pathlib import Path

import pytest

from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError
from penstock.fleet.launch import divide
from penstock.system.host import UNBOUND, CpuBinding
from tests.support.needs import needs_torch


def shares(tmp_path: Path, count: int, bindings: list[CpuBinding] | None = None, cores: int = 5, **options: object):
    config = EngineConfig.from_options(**options)
    divided = divide(
        config,
        count,
        devices=tmp_path,
        cores=lambda: cores,
        memory=lambda: 12_000,
        find_bindings=lambda number: bindings or [UNBOUND] * number,
    )
    return [(own.model.threads, own.cache.max_memory, own.model.device, binding) for own, binding in divided]


def test_a_single_engine_has_the_whole_machine(tmp_path: Path) -> None:
    assert shares(tmp_path, 1) == [(None, None, "auto", UNBOUND)]


def test_cores_and_memory_are_shared_out(tmp_path: Path) -> None:
    assert shares(tmp_path, 3) == [
        (2, 4_000, "auto", UNBOUND),
        (2, 4_000, "auto", UNBOUND),
        (1, 4_000, "auto", UNBOUND),
    ]
    assert [threads for threads, *_ in shares(tmp_path, 3, cores=2)] == [1, 1, 1]


def test_what_the_user_set_holds_for_each(tmp_path: Path) -> None:
    assert shares(tmp_path, 2, threads=7, max_memory=9) == [(7, 9, "auto", UNBOUND)] * 2


def test_on_numa_nodes_each_has_as_many_threads_as_its_binding_has_cpus(tmp_path: Path) -> None:
    bindings = [CpuBinding((0, 1, 2), 0), CpuBinding((4, 5), 1)]
    assert [(threads, binding) for threads, _, _, binding in shares(tmp_path, 2, bindings, cores=8)] == [
        (3, bindings[0]),
        (2, bindings[1]),
    ]


@needs_torch
def test_each_takes_a_gpu_of_its_own(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert [device for _, _, device, _ in shares(tmp_path, 2)] == ["cuda:0", "cuda:1"]
    assert [device for _, _, device, _ in shares(tmp_path, 2, device="cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="need as many GPUs"):
        shares(tmp_path, 3)
    with pytest.raises(ConfigError, match="cannot share cuda:1"):
        shares(tmp_path, 2, device="cuda:1")
