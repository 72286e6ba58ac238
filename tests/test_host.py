import os
from pathlib import Path

import pytest

from penstock.host import free_memory, physical_cores

MEMINFO = "MemTotal:       4096 kB\nMemFree:         100 kB\nMemAvailable:   2048 kB\n"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        file = folder / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for index in os.sched_getaffinity(0):
        topology = tmp_path / f"cpu{index}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-127\n")
    assert physical_cores(tmp_path, tmp_path) == 1


def test_without_a_topology_every_logical_core_counts(tmp_path: Path) -> None:
    assert physical_cores(tmp_path, tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "most"), [("max 100000", 10**6), ("150000 100000", 1), ("50000 100000", 1)])
def test_a_cgroup_limits_cores_to_its_share_of_time(tmp_path: Path, quota: str, most: int) -> None:
    write(tmp_path, cpu_max=quota)
    assert physical_cores(tmp_path, tmp_path) == min(most, len(os.sched_getaffinity(0)))


def test_free_memory_is_what_the_system_has_available(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO)
    assert free_memory(tmp_path / "meminfo", tmp_path / "nowhere") == 2048 * 1024


def test_a_cgroup_limits_memory_but_not_by_what_the_kernel_can_drop(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO, memory_max="1000000\n", memory_current="600000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 200000\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 600_000


def test_a_cgroup_of_version_1_limits_memory_too(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("500000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600000")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 0


def test_a_cgroup_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO, memory_max="max\n", memory_current="600000\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 2048 * 1024
