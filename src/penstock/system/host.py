"""Cores and memory available under cgroup limits, CPU and NUMA binding, child processes, and process exit."""

import atexit
import contextlib
import ctypes
import gc
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from penstock.dataclass import dataclass
from penstock.system.parent import name_parent

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_PLAIN_VARIABLES = (
    *("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_", "LD_LIBRARY_PATH", "PYTHON", "MALLOC_", "RAYON_", "TOKENIZERS_"),
    *("OPENBLAS_", "COV_CORE_", "COVERAGE_"),
)
"""Prefixes of environment variables that a Python process may need."""
_NOT_WRITTEN = 120
"""Exit code if standard output could not be flushed; the interpreter's own for this case."""
_LOW = 5
"""Niceness of a process that others need not wait for: with one of 0 on the same core it gets a quarter."""
_CAP_SYS_NICE = 23  # capabilities(7)
_AUTOGROUP_TRIES = 5
SWITCH_SECONDS = 0.0005
"""Seconds after which a thread that computes gives up the GIL to one that waits for it; Python's default is 0.005."""
CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit code after writing to a closed pipe, as in `penstock generate ... | head -1`: 128 + SIGPIPE, as in shells."""


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """The CPUs and the NUMA node to which a process is bound."""

    cpus: tuple[int, ...] = ()
    """Logical CPUs, the first of each physical core; (): all that the process may use."""
    node: int | None = None
    """The NUMA node of its memory; None: any."""

    def apply(self) -> None:
        """Bind the calling thread, the threads it will start, and future allocations to these CPUs and this node.

        Raises:
            OSError: the system does not permit it.
        """
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.node is not None:
            mask = (ctypes.c_ulong * (self.node // 64 + 1))()
            mask[self.node // 64] = 1 << self.node % 64
            number = _SET_MEMPOLICY[os.uname().machine]
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syscall(number, _MPOL_BIND, mask, 64 * len(mask) + 1):
                raise OSError(ctypes.get_errno(), f"set_mempolicy: {os.strerror(ctypes.get_errno())}")


UNBOUND = CpuBinding()


def cpu_bindings(count: int, nodes: Path = _NODES, cpus: Path = _CPUS) -> list[CpuBinding]:
    """Bindings of `count` engines, spread over the NUMA nodes, each within one node.

    Engines on one node divide its physical cores; with more engines than cores, some share a core.
    """
    allowed = _allowed_cpus()
    by_node = {node: sorted(allowed & numbers) for node, numbers in _numa_nodes(nodes).items() if allowed & numbers}
    # A machine with one node has no far memory, and the scheduler of the kernel spreads the engines.
    if len(by_node) < 2:
        return [UNBOUND] * count
    taken = [sorted(by_node)[place % len(by_node)] for place in range(count)]
    found = []
    for place, node in enumerate(taken):
        cores = _cores(by_node[node], cpus)
        nth, of = taken[:place].count(node), min(taken.count(node), len(cores))
        share = cores[nth % of :: of]
        found.append(CpuBinding(tuple(core[0] for core in share), node))
    return found


def _allowed_cpus() -> set[int]:
    """The logical CPUs that this process may use; of a system that does not say, such as macOS, all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _numa_nodes(nodes: Path) -> dict[int, set[int]]:
    """The logical CPUs of each NUMA node."""
    found = {}
    for folder in nodes.glob("node[0-9]*"):
        found[int(folder.name[4:])] = _parse_list(_read(folder / "cpulist") or "")
    return found


def _parse_list(text: str) -> set[int]:
    """Parse the kernel's list format: 0-3,8."""
    numbers: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _cores(cpus: list[int], folder: Path) -> list[list[int]]:
    """Logical CPUs grouped by physical core."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(_read(folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu), []).append(cpu)
    return list(cores.values())


def physical_cores(cpus: Path = _CPUS, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Number of physical cores in this process's CPU affinity, at most its cgroups' CPU quota."""
    allowed = _allowed_cpus()
    # Two threads of one core share its multipliers, so they count once.
    siblings = {_read(cpus / f"cpu{index}/topology/thread_siblings_list") or str(index) for index in allowed}
    return max(1, min([len(siblings), *map(int, _cpu_quotas(cgroup, membership))]))


def _cpu_quotas(cgroup: Path, membership: Path) -> Iterator[float]:
    """The CPU quota, in cores, of each cgroup that has one."""
    for folder in _cgroups(cgroup, membership, ""):
        limit = (_read(folder / "cpu.max") or "max").split()
        if limit[0] != "max":
            yield int(limit[0]) / int(limit[1])
    for folder in _cgroups(cgroup, membership, "cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            yield int(quota) / int(period)


def _cgroups(cgroup: Path, membership: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup and its ancestors, root first; each of them may set a limit.

    In a container, the path may be that of the host; then only the root exists, which is the container's own cgroup.

    Args:
        membership: the content of /proc/self/cgroup.
        controller: the controller of cgroup version 1; "" for version 2.
    """
    folders = [cgroup / controller]
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        names = [name for name in path.split("/") if name]
        if controller in controllers.split(",") and ".." not in names:
            for name in names:
                folders.append(folders[-1] / name)
    return folders


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that a process may still allocate: the system's available memory, within its cgroups' limits."""
    return max(0, min([_available(meminfo), *_free_in_cgroups(cgroup, membership)]))


def _available(meminfo: Path) -> int:
    for line in (_read(meminfo) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_cgroups(cgroup: Path, membership: Path) -> Iterator[int]:
    """Free bytes of each cgroup that has a limit, version 2 or 1; inactive page cache counts as free."""
    for controller, limit_file, used_file, cache_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroups(cgroup, membership, controller):
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if limit is not None and used is not None and limit != "max":
                lines = (_read(folder / "memory.stat") or "").splitlines()
                cached = next((int(line.split()[1]) for line in lines if line.startswith(cache_key + " ")), 0)
                # The kernel drops inactive file pages before it kills; those in use it may not.
                yield int(limit) - int(used) + cached


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context without garbage collection, which takes a fifth of the time of imports.

    What was imported then counts as old: to scan all as young would take as long again.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # the application froze nothing itself
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()


def set_low_priority(pids: Sequence[int], *, is_low: bool) -> None:
    """Give processes about a quarter of the cores that others need, too, or this process's own priority again.

    Linux keeps a priority for each session, where it groups processes by sessions, and one for each thread. That of
    threads is left alone if this process may not raise it again. May wait for half a second.
    """
    for pid in pids:
        _set_niceness(pid, _LOW if is_low else 0, threads=may_raise_priority())


def may_raise_priority() -> bool:
    """Whether this process may give others its own priority after a lower one."""
    if sys.platform != "linux":
        return False
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read(Path("/proc/self/status")) or "", re.MULTILINE)
    import resource  # not on every system

    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    has_right = effective is not None and bool(int(effective[1], 16) >> _CAP_SYS_NICE & 1)
    return has_right or limit >= 20 - os.getpriority(os.PRIO_PROCESS, 0)


def _set_niceness(pid: int, niceness: int, *, threads: bool) -> None:
    """Set the niceness of a process's session, and of the threads of the process and its descendants."""
    for _ in range(_AUTOGROUP_TRIES):
        if _set_autogroup(pid, niceness):
            break
        time.sleep(0.1)  # Linux takes ten changes a second
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir() if threads else ():
            for child in (_read(task / "children") or "").split():
                _set_niceness(int(child), niceness, threads=True)
            os.setpriority(os.PRIO_PROCESS, int(task.name), os.getpriority(os.PRIO_PROCESS, 0) + niceness)


def _set_autogroup(pid: int, niceness: int) -> bool:
    """Set the niceness of a process's session; False if Linux takes no change at the moment."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except OSError:  # there is no such group, or the process has ended
        pass
    return True


def trim_heaps() -> None:
    """Return free memory from anywhere in glibc's heaps; `free` returns only memory at their ends."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def shorten_pauses() -> None:
    """Prepare a process whose event loop answers many callers; call it when all modules are loaded.

    A full garbage collection no longer scans the loaded modules: in the server process 250 ms become 2 (100,000
    objects, busy cores). The loop releases the GIL in each system call, and waits a tenth of the default to get it back
    while other threads compute.
    """
    gc.freeze()  # without a collection: it would take 50 ms, and imports leave little garbage
    sys.setswitchinterval(SWITCH_SECONDS)


def bracketed(host: str) -> str:
    """The host part of a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def keep_own_rights() -> None:
    """Clear the owner's bits in the umask of this process and its children.

    With a umask of 777 the server could not reopen its own journal, sockets and folders.
    """
    os.umask(os.umask(0o077) & 0o077)


def plain_environment() -> dict[str, str]:
    """The environment for children that run third-party code: without keys and tokens, which they could leak."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PLAIN_VARIABLES)}


class _Starter:
    """A thread that starts child processes and lives as long as this process.

    The kernel counts the thread that started a child as its parent, and `die_with_parent` would end the child with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owner: int | None = None
        """Process id of the thread's owner: a fork does not copy threads."""

    def start(self, command: Sequence[str], options: dict[str, Any]) -> "subprocess.Popen[bytes]":
        started: Future[subprocess.Popen[bytes]] = Future()

        def start() -> None:
            try:
                started.set_result(subprocess.Popen(command, **options))
            except BaseException as error:
                started.set_exception(error)

        with self._lock:
            if self._owner != os.getpid():
                self._orders = queue.SimpleQueue()
                threading.Thread(target=_carry_out, args=(self._orders,), name="process-starter", daemon=True).start()
                self._owner = os.getpid()
        self._orders.put(start)
        return started.result()


def _carry_out(orders: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        orders.get()()


_STARTER = _Starter()
os.register_at_fork(after_in_child=_STARTER.__init__)  # type: ignore[misc]  # its lock may have been held


def start_process(command: Sequence[str], environment: dict[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a child that calls `die_with_parent`; arguments as for `subprocess.Popen`.

    Raises:
        OSError: the child cannot be started.
    """
    return _STARTER.start(command, {**options, "env": environment | name_parent()})


def start_child(module: str, line: bytes, pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    """Start `python -m module` with this process's import path, and write `line` to its standard input.

    Standard input is a pipe that stays open while this process lives, so its EOF tells the child that we have ended.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = start_process(
        [sys.executable, "-m", module],
        {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=pass_fds,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # killed already, which its watcher reports
        process.stdin.write(line)
    return process


def read_first_line() -> bytes:
    """Read the first line of standard input, a child's task; exits if the parent has ended."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            sys.exit(1)
        line += part
    return bytes(line)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Context that defers SIGINT: its handler, which raises KeyboardInterrupt, runs at the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


def end_process(code: int) -> NoReturn:
    """Exit the process without freeing its memory: the interpreter takes half a second to free torch.

    Functions registered with `atexit` are called, and output is flushed; threads are not joined.
    """
    atexit._run_exitfuncs()
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        code = CLOSED_PIPE
    except OSError:
        code = _NOT_WRITTEN
    os._exit(code)
