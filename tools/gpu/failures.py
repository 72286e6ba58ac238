"""Section 2: what happens when the device, its memory or the engine fails."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.e2e.engines import answers_of, request_of
from tests.server.running import RunningServer, running_server
from tests.support.checkpoints import write_tiny_llama
from tools.gpu.parts import Facts, Place
from tools.gpu.reference import tiny_engine
from tools.gpu.timing import attempted

# isort: split
from penstock.engine.core import EngineCore
from penstock.errors import ConfigError, DeviceLostError

NUM_TOKENS = 60


def out_of_memory(place: Place) -> Iterator[Facts]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_llama(Path(name))
        row = {"situation": "a KV cache larger than the memory", "expected": "ConfigError"}
        too_large = partial(tiny_engine, folder, place.device, kv_cache_memory="100000GiB")
        rows.append(attempted(row, partial(_outcome, too_large)))
        yield {"out of memory": rows}
        if place.is_gpu:
            row = {"situation": "no memory for a step", "expected": "DeviceLostError"}
            rows.append(attempted(row, partial(_starved, folder)))
            yield {"out of memory": rows}


def _outcome(run: Callable[[], object]) -> dict[str, Any]:
    """Which error it raised, and whether it is one of Penstock's."""
    try:
        run()
    except Exception as error:
        typed = isinstance(error, (ConfigError, DeviceLostError))
        return {"typed": typed, "what came": f"{type(error).__name__}: {error}"[:300]}
    return {"typed": False, "what came": "no error"}


def _run(core: EngineCore) -> dict[Any, Any]:
    prompt = [place % 150 for place in range(120)]
    return answers_of(core, [request_of(core, "only", prompt, 20, temperature=0.0)])


def _starved(folder: Path) -> dict[str, Any]:
    """A step when the process may allocate nothing more; then a new engine, when it may."""
    core = tiny_engine(folder, "cuda")
    expected = _run(core)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(max(torch.cuda.memory_reserved(), 1) / total)
    hoard = []  # what is reserved and unused
    for size in (2**20, 2**16, 512):
        with suppress(torch.OutOfMemoryError):
            while len(hoard) < 10000:
                hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    found = _outcome(partial(_run, core))
    del hoard
    torch.cuda.set_per_process_memory_fraction(1.0)
    core.close()
    return found | {"a new engine answers alike": _run(tiny_engine(folder, "cuda")) == expected}


def lost_context(place: Place) -> Iterator[Facts]:
    """An index beyond a tensor, which breaks the context for good: the engine must say so, and end."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        core = tiny_engine(write_tiny_llama(Path(name)), place.device)
        _run(core)
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        for situation in ("the step after it", "another step"):
            row = {"situation": situation, "expected": "DeviceLostError"}
            rows.append(attempted(row, partial(_outcome, partial(_run, core))))
            yield {"a lost context": rows}


def killed_engine(place: Place) -> Iterator[Facts]:
    """A stream whose engine is killed in the middle tells what it tells undisturbed."""
    yield {"GPU MiB in use before": _used(place)}
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_llama(Path(name))
        flags = {"device": place.device, "dtype": "float32", "packed-cache": "off", "kv-cache-memory": "8MiB"}
        began = time.monotonic()
        with running_server("--model", str(folder), *(f"--{key}={value}" for key, value in flags.items())) as server:
            yield {"server ready in s": time.monotonic() - began, "GPU MiB in use by the server": _used(place)}
            quiet, _ = _stream(server, kill_after=None)
            told, longest = _stream(server, kill_after=NUM_TOKENS // 3)
            restarts = server.metrics().get("penstock_engine_restarts_total", 0.0)
            yield {
                "the same text": told == quiet and len(quiet) > 0,
                "engine restarts": int(restarts),
                "longest wait for a token in s": longest,
            }
    yield {"GPU MiB in use after": _used(place)}


def _stream(server: RunningServer, kill_after: int | None) -> tuple[str, float]:
    """The streamed text, and the longest time between two events."""
    body = {"model": server.model, "prompt": "the quick brown fox", "max_tokens": NUM_TOKENS, "temperature": 0.7}
    body |= {"seed": 3, "stream": True, "ignore_eos": True}
    text, longest, events, last = "", 0.0, 0, time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            events += 1
            if events == kill_after:
                subprocess.run(["kill", "-KILL", str(server.engine_pid)], check=True)
    return text, longest


def _used(place: Place) -> str:
    if not place.is_gpu:
        return "no GPU"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
