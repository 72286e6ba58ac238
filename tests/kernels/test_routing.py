"""Routing against formulations of one token at a time, in every version."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.feed_forward import Routing
from penstock.kernels.ops import Ops
from tests.kernels.versions import VERSIONS, native_table, needs_native

versions = pytest.mark.parametrize("ops", VERSIONS)


def logits_of(tokens: int, experts: int, seed: int) -> Tensor:
    """Coarse, so that many are equal."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.round(rng.standard_normal((tokens, experts)) * 8).astype(np.float32) / 4)


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def first_largest(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def routed(logits: list[float], routing: Routing, correction: list[float]) -> tuple[list[int], list[float]]:
    """One token's experts and weights, of all scores but the sparse mixer."""
    scores = [1 / (1 + math.exp(-x)) for x in logits] if routing.score == "sigmoid" else logits
    compared = softmax(logits) if routing.score == "softmax" and any(correction) else scores
    choice = [score + more for score, more in zip(compared, correction, strict=True)]
    size = len(choice) // routing.groups
    tops = [
        sum(sorted(choice[group * size : (group + 1) * size])[-routing.group_tops :]) for group in range(routing.groups)
    ]
    kept = first_largest(tops, routing.top_groups)
    ids = first_largest([c if i // size in kept else -math.inf for i, c in enumerate(choice)], routing.top_k)
    weights = [softmax(logits)[i] if routing.score == "softmax" else scores[i] for i in ids]
    if routing.score == "softmax_of_top":
        weights = softmax(weights)
    total = sum(weights) + routing.epsilon if routing.renormalize else 1.0
    return ids, [weight / total * routing.scaling for weight in weights]


ROUTINGS = [
    Routing(1, 1),
    Routing(128, 8, renormalize=True),
    Routing(60, 4),
    Routing(5, 5, "softmax_of_top"),
    Routing(33, 3, "softmax_of_top"),
    Routing(40, 3, "sigmoid", renormalize=True, epsilon=1e-6),
    Routing(48, 6, "sigmoid", renormalize=True, epsilon=1e-20, scaling=2.5, groups=8, top_groups=4, group_tops=2),
    Routing(24, 4, "softmax", scaling=16.0, groups=4, top_groups=2),
]


def _takes_correction(routing: Routing) -> bool:
    return routing.score == "sigmoid" or (routing.score == "softmax" and routing.renormalize)


@versions
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.score}-{r.top_k}-of-{r.num_experts}")
@pytest.mark.parametrize("tokens", [1, 70])
def test_each_token_goes_to_its_best_experts(ops: Ops, routing: Routing, tokens: int) -> None:
    logits = logits_of(tokens, routing.num_experts, seed=tokens)
    correction = torch.linspace(-0.3, 0.3, routing.num_experts) if _takes_correction(routing) else None
    ids, weights = ops.route(logits, routing, correction)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    taken = [0.0] * routing.num_experts if correction is None else correction.tolist()
    wanted = [routed(row, routing, taken) for row in logits.tolist()]
    assert ids.tolist() == [ids for ids, _ in wanted]
    torch.testing.assert_close(weights, torch.tensor([weights for _, weights in wanted]), rtol=1e-5, atol=1e-7)


@versions
def test_a_correction_chooses_but_is_not_in_the_weights(ops: Ops) -> None:
    ids, weights = ops.route(torch.zeros(1, 4), Routing(4, 2, "sigmoid"), torch.tensor([0.0, -1.0, 2.0, 1.0]))
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


@versions
def test_the_sparse_mixer_weighs_against_those_that_are_near(ops: Ops) -> None:
    routing = Routing(4, 2, "sparsemixer", jitter=0.01)
    ids, weights = ops.route(torch.tensor([[1.0, 0.99, 0.985, 0.5], [2.0, -1.0, 2.0, 1.0]]), routing, None)
    assert ids.tolist() == [[0, 1], [0, 2]]
    near = [1 / (1 + math.exp(-0.01) + math.exp(-0.015)), 1 / (1 + math.exp(-0.005))]
    torch.testing.assert_close(weights, torch.tensor([near, [0.5, 1.0]]), rtol=1e-5, atol=0)


@needs_native
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10000), routing=st.sampled_from([*ROUTINGS, Routing(17, 2, "sparsemixer", jitter=0.01)]))
def test_the_native_router_is_the_reference(seed: int, routing: Routing) -> None:
    logits = logits_of(9, routing.num_experts, seed)
    wanted, found = (ops.route(logits, routing, None) for ops in (VERSIONS[0].values[0], native_table()))
    if routing.score == "sigmoid" and not torch.equal(wanted[0], found[0]):
        pytest.fail("sigmoids of equal logits are equal")
    assert torch.equal(wanted[0], found[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-7)


@versions
@pytest.mark.parametrize("score", ["softmax", "softmax_of_top", "sigmoid", "sparsemixer"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(ops: Ops, score: str, bad: float) -> None:
    routing = replace(Routing(20, 3, jitter=0.01), score=score)
    logits = logits_of(3, 20, seed=1)
    clean = ops.route(logits, routing, None)
    logits[1] = bad
    ids, weights = ops.route(logits, routing, None)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 20
    assert score == "sigmoid" or not weights[1].isfinite().any() or math.isinf(bad)
    for row in (0, 2):
        assert torch.equal(ids[row], clean[0][row])
        assert torch.equal(weights[row], clean[1][row])


@versions
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.score}-{r.top_k}-of-{r.num_experts}")
def test_each_expert_may_have_a_scale_of_its_own(ops: Ops, routing: Routing) -> None:
    logits, scales = logits_of(9, routing.num_experts, seed=2), torch.linspace(-1, 2, routing.num_experts)
    plain_ids, plain = ops.route(logits, routing, None)
    ids, weights = ops.route(logits, routing, None, scales)
    assert torch.equal(ids, plain_ids)
    torch.testing.assert_close(weights, plain * scales[ids.long()], rtol=1e-6, atol=0)
