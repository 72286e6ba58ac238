"""Section 1: what the machine is, and what its memory and its matrix units reach."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from tools.gpu.parts import Facts, Place
from tools.gpu.prepare import TESTS, requirements
from tools.gpu.timing import attempted, per_call

QUERIES = (
    "driver_version",
    "clocks.max.sm",
    "clocks.max.memory",
    "power.limit",
    "temperature.gpu",
    "pcie.link.gen.max",
)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(place: Place) -> Iterator[Facts]:
    yield {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton") or "missing",
        "transformers": version_of("transformers") or "missing",
        "cores": len(os.sched_getaffinity(0)),
        "host memory GiB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "compilers": ", ".join(tool for tool in ("nvcc", "gcc", "g++", "cmake", "ptxas") if shutil.which(tool))
        or "none",
    }
    yield {"missing packages": ", ".join(_missing()) or "none"}
    yield {"native library": _native_library()}
    if not place.is_gpu:
        yield {"name": f"CPU ({platform.machine()})", "threads of torch": torch.get_num_threads()}
        return
    facts = torch.cuda.get_device_properties(0)
    yield {
        "name": facts.name,
        "compute capability": f"{facts.major}.{facts.minor}",
        "CUDA of torch": torch.version.cuda,
        "devices": torch.cuda.device_count(),
        "memory GiB": facts.total_memory / 2**30,
        "free GiB": torch.cuda.mem_get_info()[0] / 2**30,
        "multiprocessors": facts.multi_processor_count,
        "L2 MiB": getattr(facts, "L2_cache_size", 0) / 2**20,
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    yield attempted({}, _asked_of_the_driver)


def _asked_of_the_driver() -> dict[str, Any]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader"]
    answered = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    return dict(zip(QUERIES, answered.split(", "), strict=True))


def _missing() -> list[str]:
    """The packages that Penstock and the parts import and that are not here."""
    names = [requirement.split(">")[0].split("=")[0].split("<")[0] for requirement in (*requirements(), *TESTS)]
    return [name for name in names if version_of(name) is None]


def _native_library() -> str:
    try:
        from penstock import native

        library = native.library()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not built: the reference kernels run on the CPU, too" if library is None else library.instruction_set


def bandwidth(place: Place) -> Iterator[Facts]:
    device = torch.device(place.device)
    size = 2**32 if place.is_gpu else 2**22
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    words = source.view(torch.float32).normal_()
    works: list[tuple[str, int, str, Callable[[], object]]] = [
        ("sum, by torch", size, "reads", words.sum),
        ("largest, by torch", size, "reads", words.max),
        ("copy", 2 * size, "reads and writes", lambda: target.copy_(source)),
        ("fill", size, "writes", target.zero_),
    ]
    rows: list[dict[str, Any]] = []
    for name, count, moves, work in works:

        def measure(work: Callable[[], object] = work, count: int = count) -> dict[str, Any]:
            return {"bytes": count, "seconds": per_call([work], device)}

        rows.append(attempted({"work": name, "moves": moves}, measure))
        yield {"memory": rows}
    rows.append(attempted({"work": "read, by Triton", "moves": "reads"}, lambda: _read_by_triton(words, device)))
    yield {"memory": rows}
    if place.is_gpu:
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = target[: 2**28]
        for name, to, origin in (("host to device, pinned", there, host), ("device to host, pinned", host, there)):

            def copy(to: Tensor = to, origin: Tensor = origin) -> dict[str, Any]:
                call = [lambda: to.copy_(origin, non_blocking=True)]
                return {"bytes": 2**28, "seconds": per_call(call, device)}

            rows.append(attempted({"work": name, "moves": "over the bus"}, copy))
        yield {"memory": rows}


def _read_by_triton(words: Tensor, device: torch.device) -> dict[str, Any]:
    from tools.gpu.kernels import read

    block, programs = 4096, 132 * 16 if device.type == "cuda" else 4
    sums = torch.empty(programs, device=device)
    count = len(words) if device.type == "cuda" else 2**16
    call = [lambda: read[(programs,)](words, sums, count, BLOCK=block)]
    return {"bytes": 4 * count, "seconds": per_call(call, device)}


def rates(place: Place) -> Iterator[Facts]:
    device, size = torch.device(place.device), 8192 if place.is_gpu else 256
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    one = torch.ones((), device=device)

    def multiplied(kind: str) -> Callable[[], object]:
        if kind == "fp8":
            a, b = (each.to(torch.float8_e4m3fn) for each in (left, right))
            return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
        if kind == "int8":
            a, b = ((20 * each).clamp(-127, 127).to(torch.int8) for each in (left, right))
            return lambda: torch._int_mm(a, b.t())
        a, b = (each.to({"bf16": torch.bfloat16, "fp32": torch.float32}[kind]) for each in (left, right))
        return lambda: a @ b.t()

    rows: list[dict[str, Any]] = []
    for kind in ("bf16", "fp8", "int8", "fp32"):

        def measure(kind: str = kind) -> dict[str, Any]:
            return {"flops": 2 * size**3, "seconds": per_call([multiplied(kind)] * 10, device)}

        rows.append(attempted({"type": kind, "size": size}, measure))
        yield {"products": rows}
