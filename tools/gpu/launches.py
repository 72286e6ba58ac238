"""Section 3: what launching costs, alone and in a CUDA graph, with and without programmatic dependent launch (PDL)."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.gpu.kernels import increment
from tools.gpu.parts import Facts, Place
from tools.gpu.timing import attempted, graph_of, per_call

STEP = 294
"""Launches of a step of an 8B model, at 9 a layer."""
BLOCK = 1024


def launches(place: Place) -> Iterator[Facts]:
    rows: list[dict[str, Any]] = []
    small, large = (torch.zeros(programs * BLOCK, device="cuda") for programs in (1, 132))
    cases = [(kind, x, early) for early in (False, True) for x in (small, large) for kind in ("eager", "graph")]
    for kind, x, early in cases:  # PDL last: a failed capture may spoil what comes after it
        row = {"launch": kind, "PDL": "yes" if early else "", "programs": len(x) // BLOCK}
        rows.append(attempted(row, partial(_graph if kind == "graph" else _eager, x, partial(_launch, x, early))))
        yield {f"{STEP} launches, each adding 1 to what the one before left": rows}


def _launch(x: Tensor, early: bool) -> None:
    increment[(len(x) // BLOCK,)](x, BLOCK=BLOCK, EARLY=early, num_warps=4, launch_pdl=early)


def _eager(x: Tensor, launch: Callable[[], object]) -> dict[str, Any]:
    launch()
    torch.cuda.synchronize()
    x.zero_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEP):
        launch()
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    right = bool((x == STEP).all())
    return {"host µs each": launched / STEP * 1e6, "µs each": whole / STEP * 1e6, "right": right}


def _graph(x: Tensor, launch: Callable[[], object]) -> dict[str, Any]:
    launch()
    start = time.perf_counter()
    replay = graph_of([launch] * STEP)
    captured = time.perf_counter() - start
    x.zero_()
    replay()
    right = bool((x == STEP).all())
    start = time.perf_counter()
    replay()
    replayed = time.perf_counter() - start
    torch.cuda.synchronize()
    each = per_call([launch] * STEP, torch.device("cuda"))
    return {
        "host µs each": replayed / STEP * 1e6,
        "µs each": each * 1e6,
        "right": right,
        "capture ms": captured * 1e3,
    }
