"""Section 3: bandwidth and rate of the Triton kernels in the shapes of an 8B model, beside the roofline."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.gpu.parts import Facts, Place
from tools.gpu.questions import PagedContexts
from tools.gpu.timing import attempted, per_call

# isort: split
from penstock.kernels.attention.triton import Cut, paged_attention
from penstock.kernels.linear.triton import linear

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""[rows, columns] of Llama 3.1 8B."""
TINY = {"qkv": (128, 64), "down": (64, 1152)}
LAYERS = 32
COLD_BYTES = 2**29
"""Bytes of weights that are used in turn, so that none is found in the L2 cache."""


def linear_speed(place: Place) -> Iterator[Facts]:
    device, rows = torch.device(place.device), []
    shapes, batches = (SHAPES, (1, 16, 64, 512, 4096)) if place.is_gpu else (TINY, (1, 17))
    for num_tokens in batches:
        for name, shape in shapes.items():
            if name == "head" and num_tokens > 64:
                continue  # a prompt's logits are those of its last token
            row = {"map": name, "tokens": num_tokens}
            rows.append(attempted(row, partial(_linear_row, shape, num_tokens, device, linear)))
            if place.is_gpu:
                theirs = attempted({}, partial(_linear_row, shape, num_tokens, device, F.linear))
                if "seconds" in theirs:
                    rows[-1]["cuBLAS µs"] = theirs["seconds"] * 1e6
            yield {"linear maps": rows}


def _linear_row(
    shape: tuple[int, int], num_tokens: int, device: torch.device, multiply: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    rows, columns = shape
    copies = max(1, min(32, COLD_BYTES // (2 * rows * columns))) if device.type == "cuda" else 1
    weights = [_random(rows, columns, device) for _ in range(copies)]
    x = _random(num_tokens, columns, device)
    moved = 2 * (rows * columns + num_tokens * (rows + columns))
    seconds = per_call([partial(multiply, x, weight) for weight in weights], device)
    return {"bytes": moved, "flops": 2 * num_tokens * rows * columns, "seconds": seconds}


def _random(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0.0, 0.05)


def attention_speed(place: Place) -> Iterator[Facts]:
    device, rows = torch.device(place.device), []
    heads = (32, 8, 128) if place.is_gpu else (4, 2, 16)
    cases = [(1, 1024), (16, 1024), (64, 1024), (64, 4096), (1, 32768)] if place.is_gpu else [(2, 70)]
    for batch, length in cases:
        for decode_rows in (64, 16):
            cut = Cut(decode_rows=decode_rows)
            row = {"sequences": batch, "keys": length, "queries": 1, "rows": decode_rows}
            rows.append(attempted(row, partial(_attention_row, heads, [length] * batch, 1, cut, device)))
            yield {"attention": rows}
    for length in (1024, 8192) if place.is_gpu else (40,):
        for tile_rows in (64, 128) if place.is_gpu else (16,):
            cut = Cut(prefill_rows=tile_rows)
            row = {"sequences": 1, "keys": length, "queries": length, "rows": tile_rows}
            rows.append(attempted(row, partial(_attention_row, heads, [length], length, cut, device)))
            yield {"attention": rows}


def _attention_row(
    heads: tuple[int, int, int], lengths: list[int], queries: int, cut: Cut, device: torch.device
) -> dict[str, Any]:
    num_heads, kv_heads, dim = heads
    contexts = PagedContexts.random(lengths, queries, device, heads)
    parts = [(seq, 0, queries) for seq in range(len(lengths))]
    batch = contexts.batch(parts)
    copies = max(1, min(16, COLD_BYTES // (2 * contexts.key.nbytes))) if device.type == "cuda" else 1
    caches = [(contexts.key.clone(), contexts.value.clone()) for _ in range(copies)]
    all_queries = torch.cat(contexts.queries)

    def attend(key: Tensor, value: Tensor) -> Tensor:

        return paged_attention(all_queries, key, value, batch, dim**-0.5, None, cut)

    pairs = sum(length * queries - queries * (queries - 1) // 2 for length in lengths)
    moved = 2 * (2 * sum(lengths) * kv_heads * dim + 2 * len(all_queries) * num_heads * dim)
    seconds = per_call([partial(attend, *cache) for cache in caches], device)
    return {"bytes": moved, "flops": 4 * pairs * num_heads * dim, "seconds": seconds}


def step_speed(place: Place) -> Iterator[Facts]:
    """The linear maps of all layers, one after another in one CUDA graph, as in a real step."""
    device, rows = torch.device(place.device), []
    shapes, layers = (SHAPES, LAYERS) if place.is_gpu else (TINY, 2)
    of_layer = {name: shape for name, shape in shapes.items() if name != "head"}
    weights = [[_random(*shape, device) for shape in of_layer.values()] for _ in range(layers)]
    size = sum(weight.nbytes for layer in weights for weight in layer)
    for num_tokens in (1, 16, 64) if place.is_gpu else (1,):
        inputs = [_random(num_tokens, columns, device) for _, columns in of_layer.values()]

        def step(inputs: list[Tensor] = inputs) -> None:
            for layer in weights:
                for x, weight in zip(inputs, layer, strict=True):
                    linear(x, weight)

        def measure(num_tokens: int = num_tokens, step: Callable[[], None] = step) -> dict[str, Any]:
            flops = num_tokens * size  # 2 a weight of 2 bytes
            return {"bytes": size, "flops": flops, "seconds": per_call([step], device)}

        rows.append(attempted({"tokens": num_tokens, "layers": layers}, measure))
        yield {"linear maps of a step": rows}
