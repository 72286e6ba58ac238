"""Section 2: the reference operations on the device, beside those on the CPU, and the speed that they reach."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.e2e.engines import answers_of, request_of
from tests.support.checkpoints import write_random, write_tiny_llama
from tests.support.families import CASES, SHAPE
from tests.support.pretended import NAME, PretendedDevice
from tools.gpu.parts import Facts, Place
from tools.gpu.shapes import ANSWER, PROMPT, batches_for, decode_row, shape_for, weight_bytes
from tools.gpu.timing import attempted, synchronize

# isort: split
from penstock.config.engine_config import EngineConfig
from penstock.config.machine import Machine
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.kernels.arrays import array_of

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "dense": "llama, two query heads to a key head",
    "window": "gemma3",
    "mixture": "qwen3 moe, a layer without experts",
    "hybrid": "qwen3.5",
    "latent": "deepseek v3",
}
NUM_PROMPTS, NUM_TOKENS = 6, 32


def same_tokens(place: Place) -> Iterator[Facts]:
    """Greedy tokens in float32.

    Where there is no GPU, a pretended device stands for it (`tests/support/pretended.py`).
    """
    os.environ["PENSTOCK_ISA"] = "reference"  # on the CPU, too
    rows: list[dict[str, Any]] = []
    for kind, case in KINDS.items() if place.is_gpu else list(KINDS.items())[:1]:
        family, changes = CASES[case]
        with tempfile.TemporaryDirectory() as folder:

            def compare(folder: str = folder, family: str = family, changes: dict[str, Any] = changes) -> Facts:
                write_random(Path(folder), family, **(SHAPE | changes))
                here = answers(Path(folder), "cpu")
                with nullcontext() if place.is_gpu else PretendedDevice():
                    there = answers(Path(folder), "cuda" if place.is_gpu else NAME)
                return _compared(here, there)

            rows.append(attempted({"kind": kind, "family": family}, compare))
        yield {"greedy answers of tiny models in float32": rows}


Answers = list[tuple[list[int], list[float]]]


def tiny_engine(folder: Path, device: str, **options: Any) -> EngineCore:
    settings = {"model": str(folder), "dtype": "float32", "threads": 1, "block_size": 16, "max_model_len": 200}
    settings |= {"max_num_seqs": 8, "max_num_batched_tokens": 48, "kv_cache_memory": "4MiB", "packed_cache": "off"}
    config = EngineConfig.from_options(**(settings | options))
    return build_engine(config, machine=Machine(device=device, cores=1, memory=2**32))


def answers(folder: Path, device: str) -> Answers:
    """Of a few prompts of different lengths: tokens and their log-probabilities."""
    core = tiny_engine(folder, device)
    prompts = [[(7 * index + 3 * place) % 150 for place in range(4 + 9 * index)] for index in range(NUM_PROMPTS)]
    requests = [
        request_of(core, str(index), prompt, NUM_TOKENS, temperature=0.0, logprobs=0)
        for index, prompt in enumerate(prompts)
    ]
    found = answers_of(core, requests)
    core.close()
    return [(tokens, [each.logprob for each in logprobs]) for _, (tokens, logprobs) in sorted(found.items())]


def _compared(here: Answers, there: Answers) -> dict[str, Any]:
    equal = sum(left[0] == right[0] for left, right in zip(here, there, strict=True))
    largest = 0.0
    for (tokens, ours), (others, theirs) in zip(here, there, strict=True):
        for left, right, value, other in zip(tokens, others, ours, theirs, strict=True):
            if left != right:
                break
            largest = max(largest, abs(value - other))
    return {
        "same tokens": equal == len(here),
        "answers alike": f"{equal} of {len(here)}",
        "logprobs differ by": largest,
    }


def throughput(place: Place) -> Iterator[Facts]:
    """Decode steps of a random model, and a prompt; no weights are read from a disk."""
    shape, rows = shape_for(is_gpu=place.is_gpu), []
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        core = random_engine(Path(folder), shape, place)
        synchronize(torch.device(place.device))
        yield {"engine built in s": time.perf_counter() - began, "memory": core.info.memory_plan.replace("\n", "; ")}
        attempted({}, partial(_steps, core, 1, shape))  # it loads the device's kernels
        for batch in batches_for(is_gpu=place.is_gpu):
            rows.append(attempted({"sequences": batch}, partial(_steps, core, batch, shape)))
            yield {f"steps after prompts of {PROMPT} tokens": rows}
        core.close()


def random_engine(folder: Path, shape: dict[str, Any], place: Place) -> EngineCore:
    (folder / "config.json").write_text(json.dumps(shape))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2 * weight_bytes(shape))  # a hole of at least the model's size, which is not read
    config = EngineConfig.from_options(
        model=str(folder),
        device=place.device,
        dtype="bfloat16",
        packed_cache="off",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        kv_cache_memory="4GiB" if place.is_gpu else "8MiB",
        enable_prefix_caching=False,
    )

    def fill(files: object, parameters: dict[str, Any], *rest: object) -> None:
        for parameter in parameters.values():
            values = torch.randn(parameter.shape, device=place.device, dtype=torch.bfloat16)
            parameter.load(0, array_of((values.mul_(0.02) if values.ndim > 1 else values.fill_(1.0)).cpu()))
            del values  # before the next, which may be as large

    with (
        mock.patch("penstock.models.loading.loader.load_weights", fill),
        mock.patch("penstock.models.registry.open_weights", return_value=[]),
    ):
        return build_engine(config)


def _steps(core: EngineCore, batch: int, shape: dict[str, Any]) -> dict[str, Any]:
    """The median time of a decode step of so many sequences, and of their prompts together."""
    for index in range(batch):
        prompt = [(index + place) % 300 for place in range(PROMPT)]
        core.add_request(request_of(core, f"{batch} {index}", prompt, ANSWER, temperature=0.0, logprobs=None))
    times, prompts = [], 0.0
    while core.has_work:
        start = time.perf_counter()
        outputs = core.step()  # it reads the tokens, so it waits for the device
        took = time.perf_counter() - start
        if any(output.error for output in outputs):
            raise RuntimeError(outputs[0].error)
        if len(outputs) == batch and prompts:
            times.append(took)
        else:
            prompts += took
    row = decode_row(shape, batch, statistics.median(times[2:]))
    return {**row, "prompt tokens/s": batch * PROMPT / prompts}


FINDING = re.compile(r"(\S.{31}) (.{22}) (.+)")


def verify(place: Place) -> Iterator[Facts]:
    """The reference operations promise the same bits in any batch on no device; this tells how far they keep to it."""
    rows: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16") if place.is_gpu else ("float32",):
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_llama(Path(folder))
            flags = ["--model", folder, "--device", place.device, "--dtype", dtype, "--packed-cache", "off"]
            lines = _lines([sys.executable, "-m", "penstock.cli", "verify", *flags, "--kv-cache-memory", "8MiB"])
            for line in lines:
                found = FINDING.fullmatch(line)
                if found:
                    situation, evidence, outcome = (each.strip() for each in found.groups())
                    row = {"dtype": dtype, "situation": situation, "evidence": evidence}
                    same = outcome == "same"
                    rows.append(row | {"same bits": same, "difference": "" if same else outcome})
                    yield {"situations": rows}
    if not rows:
        raise RuntimeError("penstock verify printed no finding")


def _lines(command: list[str]) -> Iterable[str]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield line.rstrip("\n")


FILES = ("test_other_device.py", "test_generate_like_transformers.py", "test_windows.py", "test_structured_answers.py")
"""End-to-end tests whose engines run on the GPU, where there is one, and that expect no bits of the native kernels."""


def tests(place: Place) -> Iterator[Facts]:
    chosen = [f"tests/e2e/{file}" for file in FILES]
    if not place.is_gpu:
        chosen = ["tests/e2e/test_other_device.py::test_the_device_fails_where_a_gpu_would"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "--timeout", "60", f"--junit-xml={report}", "--tb=short"]
        ran = subprocess.run([sys.executable, "-m", "pytest", *options, *chosen], cwd=ROOT)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {ran.returncode} and without a report")
        yield {"tests": list(_results(report))}


def _results(report: Path) -> Iterator[dict[str, Any]]:
    """Counts of each file, and the failed tests by name."""
    by_file: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").split(".")[-1]
        row = by_file.setdefault(file, {"file": file, "passed": 0, "failed": 0, "skipped": 0, "which failed": ""})
        outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        row["failed" if outcome in ("failure", "error") else outcome] += 1
        if outcome in ("failure", "error"):
            row["which failed"] += f"{case.get('name')} "
    yield from by_file.values()
