"""Batches of rows to sample, with what a row asks for and nothing else."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.api.sampling_params import ResolvedParams
from penstock.core.plan import SampleBatch, SampledSequence, StepResult
from penstock.kernels.reference_ops import over_tensors
from penstock.kernels.tables import make_ops
from penstock.sampling.sampler import Sampler
from tests.support.params import NEUTRAL

OPS = over_tensors(make_ops("cpu"))


def params(**changes: Any) -> ResolvedParams:
    return replace(NEUTRAL, **changes)


def batch_of(
    params: list[ResolvedParams],
    indices: list[int] | None = None,
    positions: list[int] | None = None,
    num_generated: list[int] | None = None,
    histories: Sequence[Sequence[int]] | None = None,
) -> SampleBatch:
    """One row for each of `params`; of a history, what lies behind the row's position is a draft's."""
    count = len(params)
    if positions is None:
        positions = [10] * count if histories is None else [len(history) for history in histories]
    generated = num_generated or [0] * count
    return SampleBatch(
        sequences=[
            SampledSequence(slot, slot, each, position - done, array("i", history))
            for slot, (each, position, done, history) in enumerate(
                zip(params, positions, generated, histories or map(_any_history, positions), strict=True)
            )
        ],
        indices=indices or [0] * count,
        positions=positions,
    )


def sample(logits: Tensor, batch: SampleBatch) -> StepResult:
    """By a sampler that has seen nothing before."""
    return Sampler(OPS, len(batch)).sample(logits, batch)


def _any_history(length: int) -> list[int]:
    return [token * token % 37 for token in range(length)]


def some_logits(rows: int, vocab: int = 1000, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
