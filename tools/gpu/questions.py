"""Section 3: what the interpreter cannot say of the Triton kernels. Do a GPU's matrix instructions sum alike?"""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.gpu.kernels import multiply_int8  # first: it mends the interpreter, where that runs
from tools.gpu.parts import Facts, Place
from tools.gpu.timing import attempted, synchronize

# isort: split
from penstock.kernels.attention.triton import Cut, paged_attention
from penstock.kernels.batch import Batch, lay_out
from penstock.kernels.linear.triton import FEW, MANY, SOME, Tile, launch, linear
from tests.kernels.triton_cases import CASES

MATRIX = re.compile(r"wgmma\.mma_async\S*?\.(m\d+n\d+k\d+)|(mma\.sync)\S*?\.(m\d+n\d+k\d+)|(tcgen05\.mma)")
BLOCK_SIZE = 16


def instruction_of(compiled: Any) -> str:
    """The matrix instructions of a compiled kernel, as a launch returns it."""
    if compiled is None or "ptx" not in getattr(compiled, "asm", {}):
        return "interpreter"
    found = {
        f"wgmma {wide}" if wide else f"{sync or tensor} {narrow or ''}".strip()
        for wide, sync, narrow, tensor in MATRIX.findall(compiled.asm["ptx"])
    }
    return ", ".join(sorted(found)) or "none"


def compared(one: Tensor, other: Tensor) -> dict[str, Any]:
    """How many elements differ, and by how much at most."""
    differ = int((one != other).sum())
    return {
        "same bits": differ == 0,
        "differ": differ,
        "of": one.numel(),
        "largest difference": float((one.double() - other.double()).abs().max()),
    }


def kernel_cases(place: Place) -> Iterator[Facts]:
    """The cases of the tests, which the interpreter passes."""
    device, rows = torch.device(place.device), []
    names = list(CASES) if place.is_gpu else ["linear_is_the_reference", "attention_has_the_same_bits_in_any_chunks"]
    for name in names:

        def run(name: str = name) -> dict[str, Any]:
            try:
                CASES[name](device)
                synchronize(device)
            except AssertionError as error:
                return {"holds": False, "error": str(error)[:300]}
            return {"holds": True}

        rows.append(attempted({"case": name}, run))
        yield {"cases": rows}


TILES = {
    "16 tokens": Tile(16, 64, False),
    "64 tokens": Tile(64, 64, False),
    "128 tokens": Tile(128, 64, False, stages=3),
    "128 tokens, 128 rows, 8 warps": Tile(128, 128, False, warps=8, stages=3),
    "16 tokens, 32 rows": Tile(16, 32, False),
    "64 tokens, 32 rows": Tile(64, 32, False),
}
"""On sm_90 programs of 32 rows cannot use wgmma, and use mma.sync."""


def linear_bits(place: Place) -> Iterator[Facts]:
    device = torch.device(place.device)
    sizes = (256, 512, 14336) if place.is_gpu else (64, 64, 1152)
    rows: list[dict[str, Any]] = []
    for kind in ("random", "large and small"):
        x, weight = _operands(kind, *sizes, device)
        exact = x.double() @ weight.double().t()
        first: Tensor | None = None
        for name, tile in TILES.items():

            def measure(tile: Tile = tile, x: Tensor = x, weight: Tensor = weight, exact: Tensor = exact) -> Facts:
                nonlocal first
                sums, compiled = sums_of(x, weight, tile)
                first = sums if first is None else first
                error = float((sums.double() - exact).abs().max() / exact.abs().max())
                return {"instruction": instruction_of(compiled), **compared(sums, first), "error to largest": error}

            rows.append(attempted({"numbers": kind, "tile": name}, measure))
            yield {"sums in float32, beside the first tile's": rows}
    yield {"results, beside those of 16 tokens": list(_in_other_tiles(*_operands("random", *sizes, device)))}
    yield {"what is left of 63 ones added to a power of two": list(_probe(device))}


def _in_other_tiles(x: Tensor, weight: Tensor) -> Iterator[dict[str, Any]]:
    """The whole operation as it would be used: segments split or not, and rounded."""
    first = linear(x, weight, FEW)
    for name, tile in {"16 tokens, not split": Tile(16, 64, False), "64 tokens": SOME, "128 tokens": MANY}.items():
        yield attempted({"tile": name}, partial(lambda tile: compared(linear(x, weight, tile), first), tile))


def _operands(kind: str, tokens: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(size, columns, generator=generator) for size in (tokens, rows))
    if kind != "random":  # products from 2**-16 to 2**16, so that each order rounds otherwise
        x *= torch.exp2(torch.randint(-8, 9, x.shape, generator=generator).float())
        weight *= torch.exp2(torch.randint(-8, 9, weight.shape, generator=generator).float())
    return x.bfloat16().to(device), weight.bfloat16().to(device)


def sums_of(x: Tensor, weight: Tensor, tile: Tile) -> tuple[Tensor, Any]:
    """x Wᵀ in float32, before the last rounding, and the compiled kernel: segments are added as the kernel does."""
    segments = -(-x.shape[1] // 1024)
    sums = torch.zeros(segments, len(x), len(weight), device=x.device)
    grid = (-(-len(weight) // tile.rows), -(-len(x) // tile.tokens), segments)
    compiled = launch(grid, x, weight, sums, tile, split=True)
    total = torch.zeros_like(sums[0])
    for part in sums:
        total += part
    return total, compiled


def _probe(device: torch.device) -> Iterator[dict[str, Any]]:
    """One step of 64 products: a power of two, and 63 ones. What comes out tells how an instruction rounds."""
    exponents = list(range(20, 32, 2))
    for name, tile in TILES.items():
        x, weight = torch.ones(tile.tokens, 64), torch.ones(tile.rows, 64)
        weight[: len(exponents), 0] = torch.exp2(torch.tensor(exponents, dtype=torch.float32))
        operands = (x.bfloat16().to(device), weight.bfloat16().to(device))

        def measure(tile: Tile = tile, operands: tuple[Tensor, Tensor] = operands) -> dict[str, Any]:
            sums, compiled = sums_of(*operands, tile)
            left = [int(sums[0, index].double().item() - 2.0**each) for index, each in enumerate(exponents)]
            named = {f"2^{each}": value for each, value in zip(exponents, left, strict=True)}
            return {"instruction": instruction_of(compiled), **named}

        yield attempted({"tile": name}, measure)


@dataclass(frozen=True)
class PagedContexts:
    """Random keys and values of sequences, in scattered blocks, with the queries of their last tokens."""

    queries: list[Tensor]
    key: Tensor
    value: Tensor
    tables: list[list[int]]
    lengths: list[int]

    @classmethod
    def random(
        cls, lengths: list[int], num_queries: int, device: torch.device, heads: tuple[int, int, int]
    ) -> "PagedContexts":
        """`heads`: query heads, KV heads, their size."""
        num_heads, kv_heads, dim = heads
        needed = [-(-length // BLOCK_SIZE) for length in lengths]
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randperm(sum(needed), generator=generator).tolist()
        tables = [[blocks.pop() for _ in range(count)] for count in needed]
        on_device = torch.Generator(device).manual_seed(3)
        shape = (sum(needed), BLOCK_SIZE, kv_heads, dim)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=on_device, device=device).bfloat16()

        queries = [random(num_queries, num_heads, dim) for _ in lengths]
        return cls(queries, random(*shape), random(*shape), tables, lengths)

    def batch(self, parts: list[tuple[int, int, int]]) -> Batch:
        """The step of the parts: (sequence, first of its queries, number of queries)."""
        counts = [count for _, _, count in parts]
        starts = [self.lengths[seq] - len(self.queries[seq]) + first for seq, first, _ in parts]
        tables, ids = [array("i", self.tables[seq]) for seq, _, _ in parts], array("i", [0] * sum(counts))
        memory, used = lay_out(counts, starts, tables, ids, BLOCK_SIZE)
        return Batch(memory, len(parts), sum(counts), used, self.key.device)

    def attend(self, parts: list[tuple[int, int, int]], cut: Cut, batch: Batch | None = None) -> Tensor:
        queries = torch.cat([self.queries[seq][first : first + count] for seq, first, count in parts])
        dim = self.key.shape[3]
        return paged_attention(queries, self.key, self.value, batch or self.batch(parts), dim**-0.5, None, cut)


def attention_bits(place: Place) -> Iterator[Facts]:
    device = torch.device(place.device)
    heads = (32, 8, 128) if place.is_gpu else (4, 2, 16)
    lengths = [1000, 4096, 257, 2049] if place.is_gpu else [70, 257]
    contexts = PagedContexts.random(lengths, 1, device, heads)
    alone = [(seq, 0, 1) for seq in range(len(lengths))]
    cuts = {
        "decode of 64 rows": Cut(),
        "decode of 64 rows, again": Cut(),
        "decode of 64 rows, 3 programs a head": Cut(decode_programs=3),
        "prefill of 64 rows": Cut(split=False),
        "prefill of 128 rows": Cut(split=False, prefill_rows=128),
        "decode of 16 rows": Cut(decode_rows=16),
        "prefill of 16 rows": Cut(split=False, prefill_rows=16),
    }
    rows: list[dict[str, Any]] = []
    first: Tensor | None = None
    for name, cut in cuts.items():

        def measure(cut: Cut = cut) -> dict[str, Any]:
            nonlocal first
            out = contexts.attend(alone, cut)
            first = out if first is None else first
            each = torch.cat([contexts.attend([part], cut) for part in alone])
            return {**compared(out, first), "alone as in a batch": torch.equal(out, each)}

        rows.append(attempted({"kernel": name}, measure))
        yield {"results, beside the first's": rows}
    yield {"chunks of a prompt": [_chunks(device, heads, size, place) for size in (1, 7, 64)]}


def _chunks(device: torch.device, heads: tuple[int, int, int], size: int, place: Place) -> dict[str, Any]:
    count = 160 if place.is_gpu else 9
    contexts = PagedContexts.random([500 if place.is_gpu else 40], count, device, heads)

    def measure() -> dict[str, Any]:
        whole = contexts.attend([(0, 0, count)], Cut())
        parts = [(0, first, min(size, count - first)) for first in range(0, count, size)]
        return compared(torch.cat([contexts.attend([part], Cut()) for part in parts]), whole)

    return attempted({"tokens of a chunk": size}, measure)


def int8(place: Place) -> Iterator[Facts]:
    """Sums of integers are exact in any order, so they are the same on every machine."""
    device, rows = torch.device(place.device), []
    shapes = [(64, 16, 8192, 64), (64, 128, 8192, 64), (16, 16, 8192, 32)] if place.is_gpu else [(64, 16, 256, 64)]
    for size, columns, k, step in shapes:
        for kind in ("random", "all -128"):

            def measure(
                size: int = size, columns: int = columns, k: int = k, step: int = step, kind: str = kind
            ) -> dict[str, Any]:
                generator = torch.Generator().manual_seed(k)
                a, b = (
                    torch.randint(-128, 128, (count, k), generator=generator, dtype=torch.int8)
                    for count in (size, columns)
                )
                if kind != "random":
                    a, b = a.fill_(-128), b.fill_(-128)
                out = torch.empty(size, columns, dtype=torch.int32, device=device)
                compiled = multiply_int8[(1,)](
                    a.to(device), b.to(device), out, K=k, ROWS=size, COLUMNS=columns, STEP=step
                )
                exact = a.long() @ b.long().t()
                return {"instruction": instruction_of(compiled), "exact": torch.equal(out.cpu().long(), exact)}

            rows.append(attempted({"rows": size, "columns": columns, "k": k, "numbers": kind}, measure))
            yield {"integer products": rows}
