"""Mixtures of experts: routing, and the few experts that each token meets. `reference.py` is the truth."""

from typing import Protocol

from torch import Tensor

from penstock.feed_forward import Routing
from penstock.kernels.linear.weight import LinearMap, Weight


class Route(Protocol):
    """The experts of each token."""

    def __call__(
        self, logits: Tensor, routing: Routing, correction: Tensor | None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The largest scores of each row, of equal ones the first, whatever the other rows are.

        Args:
            logits: [num_tokens, num_experts] float32.
            routing: what is made of them.
            correction: [num_experts] float32, added to sigmoids to choose by, not to the weights.
            scales: [num_experts] float32, by which the weights of the experts are multiplied in the end.

        Returns:
            The experts [num_tokens, top_k] int32, the one chosen first first, and their weights, float32.
        """
        ...


class Experts(Protocol):
    """Linear maps; each token goes through some of them."""

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        ...

    def mix(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        *,
        scale_x: bool = False,
    ) -> Tensor:
        """The sum over each token's experts, in the order of `ids`, of their weight times down(gate_up(x)).

        Args:
            x: [num_tokens, columns], contiguous.
            ids: [num_tokens, top_k] int32.
            weights: [num_tokens, top_k] float32.
            shared: added to the sum, of its type; with all columns, where a rank computes only its own.
            shared_gate: [num_tokens, 1] float32, whose sigmoid multiplies `shared`.
            scale_x: the weights multiply what the experts take, not what they give.

        Returns:
            [num_tokens, rows of down] of the type of `x`: a rank's own columns.
        """
        ...


class NewExperts(Protocol):
    """Makes experts of weights, which may be without content yet."""

    def __call__(
        self,
        gate_up: "list[LinearMap]",
        down: "list[Weight]",
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Experts:
        """
        Args:
            gate_up: one an expert, from columns to what `down` takes; all of one format.
            down: one an expert.
            gate_up_bias: [num_experts, rows of gate_up], of its weights' type of biases.
            down_bias: [num_experts, rows of down], likewise.
        """
        ...
