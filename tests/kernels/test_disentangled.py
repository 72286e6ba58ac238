"""Disentangled attention and neighbouring rows, against one text at a time, and the same bits in any company."""

from array import array

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import native
from penstock.kernels.batch import Batch
from penstock.kernels.disentangled import DisentangledOptions
from penstock.kernels.ops import Ops
from penstock.layers.disentangled import DistanceSpec, buckets
from tests.kernels.versions import VERSIONS, native_table, needs_native

HEADS, LONGEST = 3, 520
LENGTHS = (49, 1, 130, 48, 17)


def batch_of(ops: Ops, lengths: tuple[int, ...]) -> Batch:
    tables = [array("i", [index]) for index in range(len(lengths))]
    ids = array("i", [0] * sum(lengths))
    memory, blocks = ops.lay_out(lengths, [0] * len(lengths), tables, ids, 1024)
    return Batch(memory, len(lengths), sum(lengths), blocks, "cpu")


def random_options(size: int, terms: str, max_distance: int | None) -> DisentangledOptions[Tensor]:
    spec = DistanceSpec("", 0, 40, max_distance, None)
    tables = {term: torch.randn(HEADS, size, 80) for term in ("keys", "queries")}
    return DisentangledOptions(
        HEADS,
        0.2,
        tables["keys"] if "keys" in terms else None,
        tables["queries"] if "queries" in terms else None,
        torch.from_numpy(buckets(spec, LONGEST)),
    )


def expected(qkv: Tensor, options: DisentangledOptions[Tensor]) -> Tensor:
    """One text, by the formula."""
    query, key, value = qkv.double().view(len(qkv), 3, HEADS, -1).permute(1, 2, 0, 3)
    places = torch.arange(len(qkv))
    bucket = options.buckets[places[:, None] - places + LONGEST].long()
    scores = query @ key.transpose(1, 2)
    if options.keys is not None:
        scores += torch.einsum("hid,hdij->hij", query, options.keys.double()[:, :, bucket])
    if options.queries is not None:
        scores += torch.einsum("hjd,hdij->hij", key, options.queries.double()[:, :, bucket])
    return ((0.2 * scores).softmax(-1) @ value).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("terms", ["keys and queries", "keys", "queries", ""])
@pytest.mark.parametrize(("size", "max_distance"), [(20, 300), (64, None)])
def test_scores_depend_on_content_and_distance(ops: Ops, terms: str, size: int, max_distance: int | None) -> None:
    torch.manual_seed(0)
    options, qkv = random_options(size, terms, max_distance), torch.randn(sum(LENGTHS), 3 * HEADS * size)
    out = ops.disentangled_attention(qkv, options, batch_of(ops, LENGTHS))
    for ours, text in zip(out.split(LENGTHS), qkv.split(LENGTHS), strict=True):
        torch.testing.assert_close(ours, expected(text, options).float(), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("ops", VERSIONS)
def test_weights_of_huge_scores_are_finite(ops: Ops) -> None:
    torch.manual_seed(1)
    options, qkv = random_options(20, "", None), torch.randn(sum(LENGTHS), 3 * HEADS * 20)
    qkv[:, : 2 * HEADS * 20] *= 1e15
    assert ops.disentangled_attention(qkv, options, batch_of(ops, LENGTHS)).isfinite().all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_text_gets_the_same_bits_alone_and_in_a_batch_on_any_number_of_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ops, options = native_table(), random_options(20, "keys and queries", 300)
    lengths = (*LENGTHS, 300)
    qkv = torch.randn(sum(lengths), 3 * HEADS * 20).to(dtype)
    native.set_num_threads(2)
    together = ops.disentangled_attention(qkv, options, batch_of(ops, lengths)).split(lengths)
    native.set_num_threads(1)
    for ours, text in zip(together, qkv.split(lengths), strict=True):
        alone = ops.disentangled_attention(text.contiguous(), options, batch_of(ops, (len(text),)))
        assert torch.equal(ours, alone)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(alone.double(), expected(text, options), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize(("width", "columns"), [(3, 40), (5, 55)])
def test_neighbours_are_those_of_the_own_text(ops: Ops, width: int, columns: int) -> None:
    lengths, around = (4, 1, 2, 60), width // 2
    x = torch.randn(sum(lengths), 11).bfloat16()
    rows = ops.neighbours(x, batch_of(ops, lengths), width, columns)
    for ours, text in zip(rows.split(lengths), x.split(lengths), strict=True):
        padded = torch.nn.functional.pad(text, (0, 0, around, around))
        wanted = torch.cat([padded[place : place + len(text)] for place in range(width)], 1)
        assert torch.equal(ours, torch.nn.functional.pad(wanted, (0, columns - width * 11)))


def test_buckets_ascend_with_the_distance_and_end_at_the_span() -> None:
    by_distance = buckets(DistanceSpec("", 0, 40, 300, None), LONGEST)
    steps = np.diff(by_distance)
    assert ((steps == 0) | (steps == 1)).all()
    assert (by_distance[0], by_distance[LONGEST], by_distance[-1]) == (0, 40, 79)
    near = by_distance[LONGEST - 20 : LONGEST + 21]
    assert near.tolist() == list(range(20, 61))
