"""Activations of MLPs, and the routing of tokens to experts: plain data, no torch."""

from typing import Literal

from penstock.dataclass import dataclass

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2", "gelu"]
"""silu, gelu, gelu_tanh (the approximation with tanh): in gated layers act(gate) * up, otherwise act(x).
clamped_swiglu (gpt-oss), gated only: gate * sigmoid(1.702 * gate) * (up + 1), with gate and up clamped at 7.
relu2, not gated only: relu(x) ** 2."""

MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits are turned into experts and their weights. Ties go to the lower index.

    score   softmax          over all experts; a correction bias may be added for the choice
            softmax_of_top   over the chosen experts
            sigmoid          of each logit; a correction bias may be added for the choice
            sparsemixer      for each chosen expert, a softmax over the experts with nearby logits that are not chosen
                             yet (Liu et al., 2024, arXiv:2409.12136)
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "softmax_of_top", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    """Whether the weights are divided by (their sum + `epsilon`)."""
    epsilon: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    """Number of groups of consecutive experts; experts are chosen only from the best `top_groups` groups."""
    top_groups: int = 1
    group_tops: int = 1
    """A group's score is the sum of its `group_tops` largest scores."""
    jitter: float = 0.0
    """sparsemixer: a logit is nearby if its relative difference is at most 2 * jitter."""

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.num_experts // self.groups * self.top_groups
        assert self.num_experts % self.groups == 0
        assert self.num_experts <= MAX_EXPERTS
