"""The parts of `tools/gpu_day.py`, in the order in which they run. Imports neither torch nor penstock.

A part is a function `(place: Place) -> Iterator[Facts]`. Each dictionary that it yields is merged into its results, and
kept if the part then fails: values are numbers, texts, or tables as lists of rows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
SECTIONS = {
    1: "The machine",
    2: "The reference path with `--device cuda`",
    3: "Open questions of the Triton kernels",
    4: "Peers",
}


class UnavailableError(Exception):
    """A part cannot run here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part runs."""

    device: str
    """cuda or cpu"""
    wheels: Path | None = None
    """What `--prepare` downloaded."""

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the day."""

    name: str
    section: int
    title: str
    function: str
    """module:function"""
    seconds: float
    """Its time limit."""
    needs_gpu: bool = False
    """Whether it says nothing on a CPU, with Triton's interpreter or not."""


PARTS = (
    Part("machine", 1, "Device, driver, libraries", "tools.gpu.machine:describe", 30),
    Part("bandwidth", 1, "Memory bandwidth", "tools.gpu.machine:bandwidth", 40),
    Part("rates", 1, "Rates of matrix multiplication", "tools.gpu.machine:rates", 40),
    Part(
        "kernel_cases",
        3,
        "Triton kernels against the reference, and bits against tiles, batches and chunks",
        "tools.gpu.questions:kernel_cases",
        60,
    ),
    Part("linear_bits", 3, "Bits of matrix instructions", "tools.gpu.questions:linear_bits", 45),
    Part("attention_bits", 3, "Bits of decode and prefill", "tools.gpu.questions:attention_bits", 45),
    Part("int8", 3, "Integer products are exact", "tools.gpu.questions:int8", 30),
    Part("linear_speed", 3, "Linear maps of an 8B model", "tools.gpu.speed:linear_speed", 60),
    Part("attention_speed", 3, "Attention of an 8B model", "tools.gpu.speed:attention_speed", 45),
    Part("step_speed", 3, "All linear maps of an 8B step in one graph", "tools.gpu.speed:step_speed", 45),
    Part("launches", 3, "Launches, graphs, programmatic dependent launch", "tools.gpu.launches:launches", 45, True),
    Part("same_tokens", 2, "Tokens and log-probabilities beside the CPU's", "tools.gpu.reference:same_tokens", 60),
    Part("throughput", 2, "An 8B model by the reference operations", "tools.gpu.reference:throughput", 70),
    Part("verify", 2, "penstock verify", "tools.gpu.reference:verify", 75),
    Part("out_of_memory", 2, "Out of memory", "tools.gpu.failures:out_of_memory", 30),
    Part("lost_context", 2, "A lost context", "tools.gpu.failures:lost_context", 30, True),
    Part("killed_engine", 2, "A killed engine", "tools.gpu.failures:killed_engine", 60),
    Part("transformers", 4, "An 8B model by transformers", "tools.gpu.peers:transformers", 60),
    Part("vllm", 4, "An 8B model by vLLM", "tools.gpu.peers:vllm", 120, True),
    Part("tests", 2, "Tests", "tools.gpu.reference:tests", 90),
)
