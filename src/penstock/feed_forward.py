"""What feed-forward parts are made of, as plain data: activations, and how tokens are routed to experts. No torch."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2", "gelu"]
"""Of a gated map, act(gate) * up: `silu`; `gelu`, exact or by its approximation with tanh; and gpt-oss', which clamps
both at 7, where gate is multiplied by its sigmoid at 1.702 times its value, and up begins at 1. Of a map without a
gate: the square of what is positive, and all but that of gpt-oss."""

MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """How the logits of a router become experts and their weights: of equal scores the first expert is chosen.

    score   softmax          over all experts
            softmax_of_top   over those chosen
            sigmoid          of each; a correction may be added to choose by
            sparsemixer      each of the chosen by a softmax over those whose logits are near to its own and that are
                             not chosen yet (Liu et al., 2024, arXiv:2409.12136)
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "softmax_of_top", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    """Divide the weights by their sum and `epsilon`."""
    epsilon: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    """Of neighbours; only the best `top_groups` of them are chosen from."""
    top_groups: int = 1
    group_tops: int = 1
    """A group's score is the sum of so many of its largest."""
    jitter: float = 0.0
    """Of the sparse mixer: by more than twice this share of its size a logit is not near."""

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.num_experts // self.groups * self.top_groups
        assert self.num_experts % self.groups == 0
        assert self.num_experts <= MAX_EXPERTS
