"""Mixtures of experts: routing, and the computation of each token's experts. `reference.py` defines the results."""

from typing import Protocol

from penstock.config.feed_forward import Routing
from penstock.kernels.array_types import A
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.lora import ExpertUpdates


class Route(Protocol[A]):
    """The router: chooses the experts of each token."""

    def __call__(self, logits: A, routing: Routing, correction: A | None, scales: A | None = None) -> tuple[A, A]:
        """Choose the experts with the largest scores of each row; ties go to the lower index.

        Args:
            logits: [num_tokens, num_experts] float32.
            routing: the scoring function and its settings.
            correction: [num_experts] float32, a bias on the scores for the choice only, not for the weights.
            scales: [num_experts] float32, multiplied with the experts' weights at the end.

        Returns:
            The experts [num_tokens, top_k] int32, in the order of choice, and their weights [num_tokens, top_k]
            float32.
        """
        ...


class Experts(Protocol[A]):
    """The experts' MLPs, each applied to the tokens that are routed to it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def mix(
        self,
        x: A,
        ids: A,
        weights: A,
        shared: A | None,
        shared_gate: A | None,
        *,
        scale_x: bool = False,
        updates: ExpertUpdates[A] | None = None,
    ) -> A:
        """Sum weight * down(gate_up(x)) over each token's experts, in the order of `ids`.

        Args:
            x: [num_tokens, columns], contiguous.
            ids: [num_tokens, top_k] int32.
            weights: [num_tokens, top_k] float32.
            shared: the shared expert's output, added to the sum, in the dtype of `x`; has the columns of all ranks.
            shared_gate: [num_tokens, 1] float32, whose sigmoid scales `shared`.
            scale_x: whether the weights multiply the experts' inputs instead of their outputs.
            updates: the LoRA updates of the experts' maps; None: there are none.

        Returns:
            [num_tokens, rows of down] in the dtype of `x`: this rank's columns.
        """
        ...


class NewExperts(Protocol[A]):
    """Combines weights, which may not be loaded yet, into experts."""

    def __call__(
        self,
        gate_up: "list[LinearMap[A]]",
        down: "list[Weight[A]]",
        gate_up_bias: A | None,
        down_bias: A | None,
    ) -> Experts[A]:
        """
        Args:
            gate_up: one per expert, with the activation; all in the same format.
            down: one per expert.
            gate_up_bias: [num_experts, rows of gate_up], in the weights' `bias_dtype`.
            down_bias: [num_experts, rows of down], in the weights' `bias_dtype`.
        """
        ...
