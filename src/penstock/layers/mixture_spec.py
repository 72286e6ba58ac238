"""A mixture of experts, as plain data. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.feed_forward import Activation, Routing
from penstock.layers.mlp_spec import GatedMLPSpec
from penstock.layers.spec import FeedForward, MatrixSize
from penstock.memory import Working

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """What the checkpoint calls the parts, within the layer; the defaults are those of most families."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """`mlp.experts.3.gate_proj` is a matrix of one. Files that have all experts in one tensor are read as well."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared_gate: str = "mlp.shared_expert_gate"
    router_norm: str = "router.scale"
    """The whole name of the tensor, as that of the next."""
    expert_scales: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2"


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """The sum over a token's experts, of `routing.top_k`, of their weight times down(act(gate(x)) * up(x)), and of
    `shared` where there is one. See `FeedForwardSpec` for the methods.
    """

    hidden_size: int
    intermediate_size: int
    """Of an expert."""
    routing: Routing
    activation: Activation = "silu"
    bias: bool = False
    """Of the experts' maps."""
    router_bias: bool = False
    correction: bool = False
    """The router adds to its scores, to choose by."""
    shared: GatedMLPSpec | None = None
    """An MLP that every token meets."""
    shared_gate: bool = False
    """The sigmoid of a map to one number multiplies what `shared` gives."""
    scales_x: bool = False
    """The weights multiply what the experts take, not what they give."""
    expert_scales: bool = False
    """Each expert's weight is multiplied by a number of its own."""
    norms_eps: float | None = None
    """Router and experts each take a norm of their own of what the part is given; None: that as it is."""
    transposed: bool = False
    """Files that have all experts in one tensor have their matrices [columns, rows] there."""
    interleaved: bool = False
    """Such files have the rows of gate and up in turn."""
    names: MixtureNames = field(default_factory=MixtureNames)

    @property
    def working(self) -> Working:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.routing.num_experts
        widest = max(hidden, inner)
        pair = 2 * widest + inner + 2 * hidden  # a row as it is multiplied, what down is given, float32 sums
        beside = 3 * (0 if self.shared is None else self.shared.intermediate_size) + hidden
        token = self.routing.top_k * (pair + 4) + 4 * experts + beside
        return Working(token, token + 3 * self.routing.top_k * inner, widest)

    @property
    def num_other_parameters(self) -> int:
        experts, hidden = self.routing.num_experts, self.hidden_size
        biases = self.bias * experts * (2 * self.intermediate_size + hidden) + self.router_bias * experts
        shared = 0 if self.shared is None else self.shared.num_other_parameters
        norms = 0 if self.norms_eps is None else 2 * hidden
        return biases + (self.correction + self.expert_scales) * experts + norms + shared

    def matrices(self) -> Iterator[MatrixSize]:
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        yield MatrixSize(names.router, self.routing.num_experts, hidden)
        for expert in range(self.routing.num_experts):
            yield MatrixSize(f"{names.experts}.{expert}.{names.gate}", inner, hidden)
            yield MatrixSize(f"{names.experts}.{expert}.{names.up}", inner, hidden)
            yield MatrixSize(f"{names.experts}.{expert}.{names.down}", hidden, inner)
        if self.shared is not None:
            yield from self.shared.matrices()
        if self.shared_gate:
            yield MatrixSize(names.shared_gate, 1, hidden)

    def build(self, factory: "WeightFactory") -> FeedForward:
        from penstock.layers.mixture import Mixture  # here, not above: the server process has no torch

        return Mixture(self, factory)
