"""The spec of a mixture-of-experts layer: plain data, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.config.feed_forward import Activation, Routing
from penstock.config.model_facts import Working
from penstock.layers.mlp_spec import GatedMLPSpec, PlainMLPSpec
from penstock.layers.spec import FeedForward, MatrixSize

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Names of the weights in the checkpoint, within the layer; the defaults are those of most families."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """Prefix of the experts, as in `mlp.experts.3.gate_proj`. Stacked tensors of all experts are supported, too."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared_gate: str = "mlp.shared_expert_gate"
    router_norm: str = "router.scale"
    """The complete name of the tensor within the layer, like the next one."""
    expert_scales: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2"
    narrow: str = "mlp.fc1_latent_proj"
    widen: str = "mlp.fc2_latent_proj"
    stacked: tuple[tuple[str, str], ...] = ()
    """Names of stacked expert tensors in the checkpoint, within the layer, with the standard name of each."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A mixture of experts: for each token, the weighted sum of down(act(gate(x)) * up(x)) over `routing.top_k`
    experts, plus the output of `shared`, if any. With the activation `relu2`, experts have no gate.

    See `FeedForwardSpec` for the methods.
    """

    hidden_size: int
    intermediate_size: int
    """Inner size of an expert."""
    routing: Routing
    activation: Activation = "silu"
    bias: bool = False
    """Whether the experts' matrices have biases."""
    router_bias: bool = False
    correction: bool = False
    """Whether a correction bias is added to the router's scores when experts are chosen, but not to their weights."""
    shared: GatedMLPSpec | PlainMLPSpec | None = None
    """The shared expert: an MLP that processes every token."""
    shared_gate: bool = False
    """Whether the output of `shared` is scaled by the sigmoid of a linear map of the token to one number."""
    scales_x: bool = False
    """Whether the routing weights multiply the experts' inputs instead of their outputs."""
    expert_scales: bool = False
    """Whether each expert's routing weight is multiplied by a learned scale of the expert."""
    norms_eps: float | None = None
    """Epsilon of the norms of the router's and the experts' inputs; None: no such norms."""
    latent: int | None = None
    """Size of the latent space in which the experts work, with projections into and out of it; None: `hidden_size`."""
    latent_bias: bool = False
    """Whether those two projections have biases."""
    transposed: bool = False
    """Whether stacked expert tensors store the matrices transposed, as [columns, rows]."""
    interleaved: bool = False
    """Whether stacked expert tensors interleave the rows of gate and up."""
    names: MixtureNames = field(default_factory=MixtureNames)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return self.activation != "relu2"

    @property
    def expert_size(self) -> int:
        """Columns of the experts' inputs and outputs."""
        return self.latent or self.hidden_size

    @property
    def working(self) -> Working:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.routing.num_experts
        widest = max(hidden, inner)
        pair = 2 * widest + inner + 2 * hidden  # the input row, the input of down, float32 sums
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
        from penstock.layers.mixture import Mixture  # not above: specs are read before torch

        return Mixture(self, factory)
