import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.system.host import (
    SWITCH_SECONDS,
    UNBOUND,
    CpuBinding,
    cpu_bindings,
    free_memory,
    keep_own_rights,
    may_raise_priority,
    physical_cores,
    set_low_priority,
    shorten_pauses,
)

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


UNIT = "0::/system.slice/penstock.service\n"
CONTAINER = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n"


@pytest.mark.parametrize(
    ("membership", "folder"),
    [
        (UNIT, ""),
        (UNIT, "system.slice"),
        (UNIT, "system.slice/penstock.service"),
        ("0::/../outside\n", ""),
        ("0::/a:b\n", "a:b"),
    ],
)
def test_each_cgroup_of_the_process_limits_memory_and_cores(tmp_path: Path, membership: str, folder: str) -> None:
    write(tmp_path, meminfo=MEMINFO, membership=membership)
    write(tmp_path / "fs" / folder, memory_max="1000000\n", memory_current="600000\n", cpu_max="100000 100000\n")
    write(tmp_path / "fs" / "other.slice", memory_max="1\n", memory_current="1\n", cpu_max="1 100000\n")
    assert free_memory(tmp_path / "meminfo", tmp_path / "fs", tmp_path / "membership") == 400_000
    assert physical_cores(tmp_path, tmp_path / "fs", tmp_path / "membership") == 1


def test_the_narrowest_cgroup_counts(tmp_path: Path) -> None:
    write(tmp_path, meminfo=MEMINFO, membership=UNIT)
    write(tmp_path / "fs" / "system.slice", memory_max="1000000\n", memory_current="600000\n")
    write(tmp_path / "fs" / "system.slice/penstock.service", memory_max="900000\n", memory_current="100000\n")
    assert free_memory(tmp_path / "meminfo", tmp_path / "fs", tmp_path / "membership") == 400_000


@pytest.mark.parametrize("folder", ["", "docker", "docker/abc"])
def test_cgroups_of_version_1_limit_memory_and_cores(tmp_path: Path, folder: str) -> None:
    write(tmp_path, meminfo=MEMINFO, membership=CONTAINER)
    memory, cpu = tmp_path / "fs/memory" / folder, tmp_path / "fs/cpu" / folder
    for path, files in (
        (memory, {"memory.limit_in_bytes": "500000", "memory.usage_in_bytes": "200000"}),
        (cpu, {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}),
    ):
        path.mkdir(parents=True)
        for name, text in files.items():
            (path / name).write_text(text)
    assert free_memory(tmp_path / "meminfo", tmp_path / "fs", tmp_path / "membership") == 300_000
    assert physical_cores(tmp_path, tmp_path / "fs", tmp_path / "membership") == 1


def test_a_cgroup_of_version_1_without_a_quota_limits_no_cores(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("-1")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert physical_cores(tmp_path, tmp_path) == len(os.sched_getaffinity(0))


def lay_out(tmp_path: Path, nodes: dict[int, str], threads_of: dict[int, str]) -> tuple[Path, Path]:
    for node, cpus in nodes.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    for cpu, siblings in threads_of.items():
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    return tmp_path, tmp_path


def test_engines_are_spread_over_numa_nodes_and_divide_the_cores_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    siblings = {cpu: f"{cpu % 6},{cpu % 6 + 6}" for cpu in range(12)}
    where = lay_out(tmp_path, {0: "0-2,6-8", 1: "3-5,9-11"}, siblings)
    assert cpu_bindings(2, *where) == [CpuBinding((0, 1, 2), 0), CpuBinding((3, 4, 5), 1)]
    assert cpu_bindings(3, *where) == [CpuBinding((0, 2), 0), CpuBinding((3, 4, 5), 1), CpuBinding((1,), 0)]
    assert cpu_bindings(8, *where)[6] == CpuBinding((0,), 0), "a fourth engine of a node of three cores shares one"


def test_on_one_node_engines_sit_anywhere(tmp_path: Path) -> None:
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert cpu_bindings(3, *lay_out(tmp_path, {0: allowed}, {})) == [UNBOUND] * 3


def test_a_process_is_bound_to_its_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"""
import os
from penstock.system.host import CpuBinding
try:
    CpuBinding(({cpu},), 0).apply()
except OSError as error:  # a container may forbid to choose memory
    print(error)
print(os.sched_getaffinity(0))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == str({cpu})


ENDS = """
import atexit, os, sys
from penstock.system.host import end_process

class Kept:
    def __del__(self):
        os.write(2, b"freed")

kept = Kept()
atexit.register(print, "called")
print("printed")
end_process(3)
"""


def test_a_process_that_ends_calls_and_writes_what_is_due_and_frees_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\ncalled\n", "")


def test_a_process_whose_output_cannot_be_written_ends_as_the_interpreter_does() -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", ENDS], stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert (done.returncode, done.stderr) == (120, b"")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run([sys.executable, "-c", ENDS], stdout=pipe, stderr=subprocess.PIPE, env=buffered)
    assert (done.returncode, done.stderr) == (141, b"")  # as if SIGPIPE had killed it


@pytest.mark.parametrize(("mask", "kept"), [(0o777, 0o077), (0o022, 0o022), (0o000, 0o000), (0o300, 0o000)])
def test_a_umask_takes_no_rights_from_the_user(mask: int, kept: int) -> None:
    before = os.umask(mask)
    try:
        keep_own_rights()
        assert os.umask(before) == kept
    finally:
        os.umask(before)


def test_a_serving_process_collects_without_its_modules_and_threads_take_short_turns() -> None:
    interval, loaded = sys.getswitchinterval(), len(gc.get_objects())
    try:
        shorten_pauses()
        assert len(gc.get_objects()) < loaded / 10
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


@pytest.mark.skipif(not may_raise_priority(), reason="this user may not raise a priority again")
def test_a_process_has_a_low_priority_until_it_gets_ours_again() -> None:
    script = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threads = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(threads) == 2
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for is_low in (True, False):
            set_low_priority([process.pid], is_low=is_low)
            assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {own + 5 * is_low}
    set_low_priority([process.pid], is_low=True)  # it has ended
