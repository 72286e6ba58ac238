"""What the Triton kernels must fulfil, on any device: near the reference, and the same bits however the work is cut.

Each case is a function of a device: in the tests the CPU with Triton's interpreter, in `tools/gpu_day.py` a GPU.
"""

import itertools
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels.attention import reference
from penstock.kernels.attention.triton import Cut, paged_attention
from penstock.kernels.batch import Batch, lay_out
from penstock.kernels.linear.triton import FEW, MANY, SOME, Tile, linear

BLOCK_SIZE = 16
Case = Callable[[torch.device], None]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def random_matrices(num_tokens: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    x, weight = (torch.randn(size, columns, generator=generator) for size in (num_tokens, rows))
    return x.bfloat16().to(device), (0.05 * weight).bfloat16().to(device)


def linear_is_the_reference(device: torch.device) -> None:
    """Rows, tokens and columns that fill no tile, and one segment, several, and part of one."""
    for num_tokens, rows, columns in ((1, 70, 64), (5, 64, 1100), (17, 130, 1024), (70, 66, 2100)):
        x, weight = random_matrices(num_tokens, rows, columns, device)
        exact = F.linear(x.double(), weight.double())
        error = (linear(x, weight).double() - exact).abs().max().item()
        assert error <= 2**-8 * exact.abs().max().item(), (num_tokens, rows, columns, error)


def linear_has_the_same_bits_in_every_tile(device: torch.device) -> None:
    x, weight = random_matrices(37, 100, 2304, device)
    whole = linear(x, weight, Tile(16, 64, split=False))
    for tile in (FEW, Tile(64, 64, split=True), SOME, MANY):
        assert same_bits(linear(x, weight, tile), whole), tile
    for row in range(0, 37, 9):
        assert same_bits(linear(x[row : row + 1].clone(), weight), whole[row : row + 1]), row


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


HEADS = (Heads(8, 2, 16, None), Heads(6, 2, 32, 100), Heads(2, 2, 16, 24))
LENGTHS = [1, 17, 256, 257, 300]


class PagedSequences:
    """Random sequences in a paged cache whose other slots are NaN, behind the window, too."""

    def __init__(self, heads: Heads, device: torch.device) -> None:
        self.heads, self.device = heads, device
        generator = torch.Generator().manual_seed(heads.num_heads)
        needed = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        blocks = random.Random(1).sample(range(sum(needed) + 3), sum(needed))
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        shape = (sum(needed) + 3, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        self.queries = [
            torch.randn(length, heads.num_heads, heads.head_dim, generator=generator).bfloat16() for length in LENGTHS
        ]
        self.key, self.value = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        self.nan = torch.ones(shape[:2], dtype=torch.bool)
        for length, table in zip(LENGTHS, self.tables, strict=True):
            for position in range(length):
                self.nan[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = False

    def attend(self, parts: list[tuple[int, int, int]], cut: Cut | None) -> Tensor:
        """The parts' queries, (sequence, first position, number of tokens); with a cut by the kernels, else by the
        reference.
        """
        counts, starts = [count for _, _, count in parts], [start for _, start, _ in parts]
        tables, ids = [array("i", self.tables[seq]) for seq, _, _ in parts], array("i", [0] * sum(counts))
        memory, used = lay_out(counts, starts, tables, ids, BLOCK_SIZE)
        batch = Batch(memory, len(parts), sum(counts), used, self.device if cut else torch.device("cpu"))
        queries = torch.cat([self.queries[seq][start : start + count] for seq, start, count in parts])
        scale, window = self.heads.head_dim**-0.5, self.heads.window
        if cut is not None:
            unseen = self.nan | self._behind_the_window(parts)
            key, value = (side.masked_fill(unseen[..., None, None], torch.nan) for side in (self.key, self.value))
            on_device = (each.to(self.device) for each in (queries, key, value))
            return paged_attention(*on_device, batch, scale, window, cut).cpu()
        seen = reference.Seen(window)
        plan = reference.plan_attention(batch, BLOCK_SIZE, 4096, seen)
        stored = reference.Stored(self.key.float(), self.value.float(), None, None)
        return reference.paged_attention(queries.float(), stored, plan, scale, seen, None, None)

    def _behind_the_window(self, parts: list[tuple[int, int, int]]) -> Tensor:
        behind = torch.zeros_like(self.nan)
        for seq, start, _ in parts:
            for position in range(max(0, start - self.heads.window + 1) if self.heads.window else 0):
                behind[self.tables[seq][position // BLOCK_SIZE], position % BLOCK_SIZE] = True
        return behind


DECODES = [(seq, length - 1, 1) for seq, length in enumerate(LENGTHS)]
CHUNKS = [(0, 0, 1), (1, 8, 9), (2, 246, 10), (3, 240, 17), (4, 275, 25)]


def attention_is_the_reference(device: torch.device) -> None:
    for heads in HEADS:
        sequences = PagedSequences(heads, device)
        for parts in (DECODES, CHUNKS, DECODES[2:4] + CHUNKS[1:2]):
            exact = sequences.attend(parts, None)
            error = (sequences.attend(parts, Cut(prefill_rows=32)).float() - exact).abs().max().item()
            assert error <= 0.02, (heads, parts, error)


def attention_has_the_same_bits_in_decode_prefill_and_any_batch(device: torch.device) -> None:
    for heads in HEADS[:2]:
        sequences = PagedSequences(heads, device)
        decoded = sequences.attend(DECODES, Cut())
        assert same_bits(decoded, sequences.attend(DECODES, Cut(split=False))), (heads, "prefill")
        assert same_bits(decoded, sequences.attend(DECODES, Cut(decode_programs=3))), (heads, "three programs")
        for row, part in enumerate(DECODES):
            assert same_bits(sequences.attend([part], Cut()), decoded[row : row + 1]), (heads, part, "alone")


def attention_has_the_same_bits_in_any_chunks(device: torch.device) -> None:
    for heads in HEADS[:2]:
        sequences = PagedSequences(heads, device)
        whole = sequences.attend([(4, 262, 38)], Cut())
        borders = [262, 263, 288, 299, 300]
        parts = [(4, start, end - start) for start, end in itertools.pairwise(borders)]
        chunks = [sequences.attend([part], Cut()) for part in parts]
        assert same_bits(torch.cat(chunks), whole), heads


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        linear_is_the_reference,
        linear_has_the_same_bits_in_every_tile,
        attention_is_the_reference,
        attention_has_the_same_bits_in_decode_prefill_and_any_batch,
        attention_has_the_same_bits_in_any_chunks,
    )
}
