"""Times of work on a device."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]


def per_call(calls: Sequence[Call], device: torch.device, repeats: int = 7) -> float:
    """Seconds of one of the calls, which do alike on different memory: the median of several rounds over all of them.

    On a GPU the calls are one CUDA graph, as the host could not launch short ones fast enough. They should touch more
    memory together than the caches hold.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return statistics.median(_clocked(calls) for _ in range(min(repeats, 3))) / len(calls)
    run = graph_of(calls)
    run()
    return statistics.median(_on_device(run) for _ in range(repeats)) / len(calls)


def graph_of(calls: Sequence[Call]) -> Call:
    """Capture calls that have run before; returns the function that replays them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _clocked(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def _on_device(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def attempted(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row of a table with what is measured, or with the error: one measurement that fails costs no other."""
    try:
        return row | measure()
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}
