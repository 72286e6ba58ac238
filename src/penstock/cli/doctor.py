"""`penstock doctor`: what this machine has, what is missing for speed or for a feature, and what to run.

Each check is a function that yields findings; none changes anything, and none needs a model other than the demo.
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from penstock import __version__
from penstock.cli.parser import Parser
from penstock.config.byte_counts import in_words
from penstock.config.settings import packed_cache_folder
from penstock.dataclass import dataclass
from penstock.errors import MissingTorchError, PenstockError
from penstock.system.host import free_memory, physical_cores

State = Literal["ok", "note", "fault"]
MARKS: dict[State, str] = {"ok": "✓", "note": "!", "fault": "✗"}
FLAGS_OF_SETS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512f", "avx512_vnni"},
    "avx512_bf16": {"avx512f", "avx512_vnni", "avx512_bf16"},
    "amx": {"amx_tile", "amx_int8", "amx_bf16"},
}
"""Flags of /proc/cpuinfo by instruction set, from the least to the best."""
EXTRAS = {
    "images": ("PIL", "pictures in prompts"),
    "audio": ("av", "transcripts of FLAC, MP3, Ogg, M4A and WebM files"),
    "torch": ("torch", "GPUs, several nodes, quantize, the reference kernels"),
    "transformers": ("transformers", "models of --backend transformers"),
    "otel": ("opentelemetry.sdk", "traces"),
    "ray": ("ray", "clusters"),
    "nixl": ("nixl_cu12", "KV blocks from other machines"),
    "plots": ("matplotlib", "plots of penstock simulate"),
}
"""A module of each extra of the package, which shows whether it is installed, and the use of the extra. ray-serve
includes ray.
"""
OPEN_FILES = 4096
"""Connections and files that a busy server has open at once."""
FREE_DISK = 10 << 30
BANDWIDTH_BYTES = 64 << 20
"""Bytes that each thread reads to measure the memory, more than its share of most caches."""
BITS_4 = 0.6e9
"""Bytes of a billion weights in 4 bits, with their scales."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    state: State
    topic: str
    text: str
    advice: str = ""
    """The command to run or the setting to change; empty if none."""


Check = Callable[[], Iterator[Finding]]


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: what it has, what is missing, what to run",
        description="Check this machine and this installation, and say what would make Penstock faster. Exits with 1 "
        "if something is broken. Takes about two seconds.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for a bug report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = [finding for check in CHECKS for finding in check()]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            print(f"{MARKS[finding.state]} {finding.topic:{width}}  {finding.text}")
            if finding.advice:
                print(f"  {'':{width}}  → {finding.advice}")
    return int(any(finding.state == "fault" for finding in findings))


def check_versions() -> Iterator[Finding]:
    """Penstock, Python and the system."""
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield Finding("ok", "version", f"Penstock {__version__}, Python {platform.python_version()}, {system}")


def check_processor() -> Iterator[Finding]:
    """The processor and the cores that this process may use."""
    cores, logical = physical_cores(), os.cpu_count() or 1
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    yield Finding("ok", "processor", f"{name}: {_count(cores, 'core')} of {logical} logical processors may be used")


def check_kernels() -> Iterator[Finding]:
    """The native library, and whether it has the best instruction set of the processor."""
    from penstock import native

    try:
        library = native.library()  # logs a warning of its own if there is none
    except PenstockError as error:
        reinstall = "reinstall Penstock: pip install --force-reinstall --no-deps ."
        says_what_to_do = isinstance(error, MissingTorchError)
        yield Finding("fault", "kernels", str(error), "" if says_what_to_do else reinstall)
        return
    if library is None:
        advice = "install a C++ compiler (g++ or clang++) and reinstall Penstock, or install a wheel"
        yield Finding("note", "kernels", "the slow reference kernels: decoding is 4 to 15 times slower", advice)
        return
    text = f"native, {library.instruction_set} (built: {', '.join(library.built)})"
    flags = set((_cpuinfo("flags") or "").split())
    best = [name for name, needed in FLAGS_OF_SETS.items() if needed <= flags][-1:]
    if best and best[0] not in library.built and not os.environ.get("PENSTOCK_ISA"):
        yield Finding("note", "kernels", f"{text}; this processor also has {best[0]}", "reinstall Penstock here")
        return
    yield Finding("ok", "kernels", text)


def check_memory() -> Iterator[Finding]:
    """Free memory, its speed, and what fits."""
    free = free_memory()
    speed = _bandwidth(physical_cores())
    fits = int(free * 0.8 / BITS_4)
    tokens = speed / (4 * BITS_4)
    yield Finding(
        "ok",
        "memory",
        f"{in_words(free)} free, read at {speed / 1e9:.0f} GB/s: models of up to {fits} billion parameters fit in 4 "
        f"bits; one of 4 billion gives at most {tokens:.0f} tokens/s to one stream",
    )
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if path.exists() and "[never]" in path.read_text():
        yield Finding(
            "note", "huge pages", "are off: every weight is read through small pages", f"as root: echo madvise > {path}"
        )


def check_disk() -> Iterator[Finding]:
    """Room for downloaded models and packed weights."""
    hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    packed = packed_cache_folder(os.environ.get("PENSTOCK_PACKED_CACHE") or "auto")
    for topic, folder in (("models", hub), ("packed weights", None if packed is None else Path(packed))):
        if folder is None:
            continue
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            yield Finding(
                "note", topic, f"{folder} cannot be written", "set HF_HOME or --packed-cache to another folder"
            )
        elif free < FREE_DISK:
            yield Finding(
                "note", topic, f"{folder}: {in_words(free)} free", "penstock cache --clear, or another folder"
            )
        else:
            yield Finding("ok", topic, f"{folder}: {in_words(free)} free")


def check_limits() -> Iterator[Finding]:
    """Open files, which bound connections."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES and (most == resource.RLIM_INFINITY or most > files):
        yield Finding("note", "open files", f"at most {files}: too few for a busy server", f"ulimit -n {OPEN_FILES}")


def check_extras() -> Iterator[Finding]:
    """Optional packages, and a GPU that is there without the package that it needs."""
    found = {extra: _is_installed(module) for extra, (module, _) in EXTRAS.items()}
    missing = [f"{extra} ({EXTRAS[extra][1]})" for extra, is_there in found.items() if not is_there]
    there = [extra for extra, is_there in found.items() if is_there]
    text = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    yield Finding("ok", "extras", text)
    if Path("/dev/nvidiactl").exists() and not found["torch"]:
        yield Finding("note", "GPU", "an NVIDIA GPU is here, but torch is not", "pip install '.[torch]'")


def check_answer() -> Iterator[Finding]:
    """Whether the demo model answers a sum."""
    from penstock import LLM, SamplingParams

    begun = time.monotonic()
    try:
        with LLM() as llm:
            question = [{"role": "user", "content": "What is 37 + 58?"}]
            text = llm.chat(question, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text.strip()
    except PenstockError as error:
        yield Finding("fault", "demo model", f"fails: {error}")
        return
    right = "95" in text
    state: State = "ok" if right else "fault"
    yield Finding(state, "demo model", f"answers {text!r} after {time.monotonic() - begun:.1f} s")


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_processor,
    check_kernels,
    check_memory,
    check_disk,
    check_limits,
    check_extras,
    check_answer,
)


def _cpuinfo(key: str) -> str | None:
    """A value of the first processor in /proc/cpuinfo; None where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _bandwidth(threads: int) -> float:
    """Bytes per second at which `threads` threads read memory together."""
    import numpy as np

    parts = [np.ones(BANDWIDTH_BYTES // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - begun)
    return threads * BANDWIDTH_BYTES / min(seconds)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
