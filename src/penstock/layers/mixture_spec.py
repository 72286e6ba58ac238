"""A mixture of experts, as plain data. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.feed_forward import Activation, Routing
from penstock.layers.mlp_spec import GatedMLPSpec, PlainMLPSpec
from penstock.layers.spec import FeedForward, MatrixSize
from penstock.model_facts import Working

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
    narrow: str = "mlp.fc1_latent_proj"
    widen: str = "mlp.fc2_latent_proj"
    stacked: tuple[tuple[str, str], ...] = ()
    """What files call the tensors of all experts, within the layer, and the name that is read as such."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """The sum over a token's experts, of `routing.top_k`, of their weight times down(act(gate(x)) * up(x)), and of
    `shared` where there is one. Experts of the activation `relu2` have no gate. See `FeedForwardSpec` for the methods.
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
    shared: GatedMLPSpec | PlainMLPSpec | None = None
    """An MLP that every token meets."""
    shared_gate: bool = False
    """Whether the output of `shared` is scaled by the sigmoid of a map to one number."""
    scales_x: bool = False
    """The weights multiply what the experts take, not what they give."""
    expert_scales: bool = False
    """Each expert's weight is multiplied by a number of its own."""
    norms_eps: float | None = None
    """Router and experts each take a norm of their own of what the part is given; None: that as it is."""
    latent: int | None = None
    """Experts work on a map of the hidden states to so many columns, and another one leads back; None: no such maps."""
    latent_bias: bool = False
    """Of these two maps."""
    transposed: bool = False
    """Files that have all experts in one tensor have their matrices [columns, rows] there."""
    interleaved: bool = False
    """Such files have the rows of gate and up in turn."""
    names: MixtureNames = field(default_factory=MixtureNames)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return self.activation != "relu2"

    @property
    def expert_size(self) -> int:
        """Columns of what experts take, and of what they give."""
        return self.latent or self.hidden_size

    @property
    def working(self) -> Working:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.routing.num_experts
        widest = max(hidden, inner)
        pair = 2 * widest + inner + 2 * hidden  # a row as it is multiplied, what down is given, float32 sums
        beside = 3 * (0 if self.shared is None else self.shared.intermediate_size) + hidden + 2 * (self.latent or 0)
        token = self.routing.top_k * (pair + 4) + 4 * experts + beside
        return Working(token, token + 3 * self.routing.top_k * inner, widest)

    @property
    def num_other_parameters(self) -> int:
        experts, hidden = self.routing.num_experts, self.hidden_size
        inner = (1 + self.gated) * self.intermediate_size
        biases = self.bias * experts * (inner + self.expert_size) + self.router_bias * experts
        biases += self.latent_bias * (hidden + (self.latent or 0))
        shared = 0 if self.shared is None else self.shared.num_other_parameters
        norms = 0 if self.norms_eps is None else 2 * hidden
        return biases + (self.correction + self.expert_scales) * experts + norms + shared

    @property
    def divided_by(self) -> int:
        return 0

    def share(self, ranks: int) -> "MixtureSpec":
        return replace(
            self,
            intermediate_size=-(-self.intermediate_size // ranks),
            shared=None if self.shared is None else self.shared.share(ranks),
        )

    def matrices(self) -> Iterator[MatrixSize]:
        names, hidden, inner, size = self.names, self.hidden_size, self.intermediate_size, self.expert_size
        yield MatrixSize(names.router, self.routing.num_experts, hidden)
        if self.latent is not None:
            yield MatrixSize(names.narrow, self.latent, hidden)
            yield MatrixSize(names.widen, hidden, self.latent)
        for expert in range(self.routing.num_experts):
            if self.gated:
                yield MatrixSize(f"{names.experts}.{expert}.{names.gate}", inner, size)
            yield MatrixSize(f"{names.experts}.{expert}.{names.up}", inner, size)
            yield MatrixSize(f"{names.experts}.{expert}.{names.down}", size, inner)
        if self.shared is not None:
            yield from self.shared.matrices()
        if self.shared_gate:
            yield MatrixSize(names.shared_gate, 1, hidden)

    def build(self, factory: "WeightFactory") -> FeedForward:
        from penstock.layers.mixture import Mixture  # here, not above: the server process has no torch

        return Mixture(self, factory)
