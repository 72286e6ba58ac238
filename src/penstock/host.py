"""What the system offers this process: cores and memory, within its cgroup's limits."""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def physical_cores(cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Physical cores among the logical ones that this process may run on, within its cgroup's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = {_read(cpus / f"cpu{index}/topology/thread_siblings_list") or str(index) for index in allowed}
    quota = _cpu_quota(cgroup)
    return max(1, len(siblings) if quota is None else min(len(siblings), int(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the cgroup grants, or None where it sets no limit."""
    text = _read(cgroup / "cpu.max")
    if text is None or text.startswith("max"):
        return None
    quota, period = text.split()
    return int(quota) / int(period)


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that a process may still take: what the system has available, within the cgroup's limit."""
    free = _available(meminfo)
    limit, used = _cgroup_memory(cgroup)
    return free if limit is None else max(0, min(free, limit - used))


def _available(meminfo: Path) -> int:
    for line in (_read(meminfo) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_memory(cgroup: Path) -> tuple[int | None, int]:
    """(limit or None, bytes in use that the kernel cannot drop) of cgroup version 2 or 1."""
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(cgroup / limit_file), _read(cgroup / used_file)
        if limit is not None and used is not None and limit != "max":
            stat = _read((cgroup / limit_file).with_name("memory.stat")) or ""
            cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(cache_key + " ")), 0)
            return int(limit), int(used) - cached
    return None, 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
