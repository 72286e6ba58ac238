"""Routing and experts in plain torch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.config.feed_forward import Routing
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.lora import ExpertUpdates, LoraTable, LoraUpdate
from penstock.kernels.lora.rows import AdapterRows
from penstock.kernels.ranks import Collective


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `penstock.kernels.experts.Route`."""
    assert scales is None or routing.score != "sparsemixer"
    if routing.score == "sparsemixer":
        return _mixed_sparsely(logits, routing)
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits
    choice = scores  # softmax preserves the order
    if correction is not None:
        choice = (logits.softmax(-1) if routing.score == "softmax" else scores) + correction
    if routing.groups > 1:
        choice = _within_best_groups(choice, routing)
    ids = _largest(choice, routing.top_k)
    if routing.score == "softmax":
        scores = logits.softmax(-1)
    weights = scores.gather(-1, ids)
    if routing.score == "softmax_of_top":
        weights = weights.softmax(-1)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    weights = weights * routing.scaling
    return ids.int(), weights if scales is None else weights * scales[ids]


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values along the last axis, in descending order; ties go to the lower index."""
    _, places = values.sort(stable=True, dim=-1, descending=True)
    return places[..., :count]


def _within_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    grouped = choice.view(len(choice), routing.groups, -1)
    scores = grouped.gather(-1, _largest(grouped, routing.group_tops)).sum(-1)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, _largest(scores, routing.top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).view_as(choice)


def _mixed_sparsely(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits, [], []
    for _ in range(routing.top_k):
        chosen = _largest(left, 1)
        most = left.gather(-1, chosen)
        far = (most - logits) / logits.abs().clamp(min=most) > 2 * routing.jitter
        ids.append(chosen)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(ids, -1).int(), torch.cat(weights, -1)


class ReferenceExperts:
    """See `penstock.kernels.experts.Experts` for the methods."""

    def __init__(
        self,
        gate_up: list[LinearMap[Tensor]],
        down: list[Weight[Tensor]],
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        collective: Collective[Tensor],
    ) -> None:
        self._gate_up, self._down, self._biases = gate_up, down, (gate_up_bias, down_bias)
        self._collective = collective

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self._gate_up, *self._down))

    def mix(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        *,
        scale_x: bool = False,
        updates: ExpertUpdates[Tensor] | None = None,
    ) -> Tensor:
        tokens, top_k = ids.shape
        outs = torch.empty(tokens, top_k, self._down[0].rows, device=x.device)
        for expert in sorted(set(ids.flatten().tolist())):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            taken = x[rows] * weights[rows, places, None].to(x.dtype) if scale_x else x[rows]
            outs[rows, places] = self._expert(expert, taken, updates, rows)
        total = torch.zeros_like(outs[:, 0])
        for place in range(top_k):  # a fixed order of summation
            total += outs[:, place] if scale_x else weights[:, place, None] * outs[:, place]
        if shared is not None:
            own = self._collective.ranks.own(shared.shape[1])
            shared = shared[:, own.start : own.stop]
            total += shared.float() if shared_gate is None else shared_gate.sigmoid() * shared.float()
        return total.to(x.dtype)

    def _expert(self, expert: int, x: Tensor, updates: ExpertUpdates[Tensor] | None, tokens: Tensor) -> Tensor:
        """[rows, columns] -> [rows, rows of down] float32, of these tokens."""
        gate_up_bias, down_bias = (None if bias is None else bias[expert] for bias in self._biases)
        rows = None if updates is None or updates.rows.is_empty else AdapterRows()
        if rows is not None and updates is not None:
            rows.assign(updates.rows.row_slots[tokens.cpu().numpy().astype(np.int64)])

        def update(x: Tensor, tables: Sequence[LoraTable[Tensor]]) -> LoraUpdate[Tensor] | None:
            return None if rows is None or rows.is_empty else tables[expert].update(x, rows)

        of_first = None if updates is None else update(x, updates.gate_up)
        inner = self._gate_up[expert].linear(x, gate_up_bias, x.dtype, of_first)
        inner = self._collective.columns(inner, self._down[expert].columns)
        of_down = None if updates is None else update(inner, updates.down)
        outer: Tensor = self._down[expert].linear(inner, down_bias, torch.float32, of_down)
        return outer
