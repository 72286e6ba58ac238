"""The mixture-of-experts layer."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Generic

from penstock.config.feed_forward import Activation, Routing
from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.lora import ExpertUpdates
from penstock.layers.linear import Linear, output_linear
from penstock.layers.mlp import GatedMLPSpec, PlainMLPSpec
from penstock.layers.norm import Norm
from penstock.layers.spec import FeedForward, NormSpec
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kernels.experts import Experts
    from penstock.kernels.linear.weight import LinearMap, Weight
    from penstock.kernels.lora import LoraTable
    from penstock.kernels.lora.rows import AdapterRows
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
    def activation_sizes(self) -> ActivationSizes:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.routing.num_experts
        widest = max(hidden, inner)
        pair = 2 * widest + inner + 2 * hidden  # the input row, the input of down, float32 sums
        beside = 3 * (0 if self.shared is None else self.shared.intermediate_size) + hidden + 2 * (self.latent or 0)
        token = self.routing.top_k * (pair + 4) + 4 * experts + beside
        return ActivationSizes(token, token + 3 * self.routing.top_k * inner, widest)

    @property
    def tp_divisor(self) -> int:
        return 0

    def shard(self, tp_size: int) -> MixtureSpec:
        return replace(
            self,
            intermediate_size=-(-self.intermediate_size // tp_size),
            shared=None if self.shared is None else self.shared.shard(tp_size),
        )

    def build(self, factory: WeightFactory[A]) -> FeedForward[A]:
        return Mixture(self, factory)


class Mixture(Generic[A]):
    """A router, its experts and optional shared experts. See `FeedForward`."""

    def __init__(self, spec: MixtureSpec, factory: WeightFactory[A]) -> None:
        names, experts = spec.names, spec.routing.num_experts
        self._routing, self._ops = spec.routing, factory.ops
        hidden, scores = spec.hidden_size, factory.logits_dtype
        self._router = Linear(
            (names.router,), hidden, (experts,), factory, bias=spec.router_bias, whole=True, dtype=scores
        )
        self._correction = factory.float32(names.correction, Piece(experts, whole=True)) if spec.correction else None
        self._scales = None
        if spec.expert_scales:
            self._scales = factory.float32(names.expert_scales, Piece(experts, whole=True))
        self._norms = None if spec.norms_eps is None else _Norms(spec, spec.norms_eps, factory)
        self.experts, self._gate_up_lora, self._down_lora = _experts(spec, factory)
        self._size = spec.expert_size
        self._scales_x = spec.scales_x
        self._shared = None if spec.shared is None else spec.shared.build(factory)
        self._shared_gate = None
        if spec.shared_gate:
            self._shared_gate = Linear(
                (names.shared_gate,), hidden, (1,), factory, bias=False, whole=True, dtype=scores
            )
        self._narrow = self._widen = None
        if spec.latent is not None:
            assert self._shared_gate is None
            bias = spec.latent_bias
            self._narrow = Linear((names.narrow,), hidden, (spec.latent,), factory, bias=bias, gather_output=True)
            self._widen = output_linear(names.widen, spec.latent, hidden, factory, bias=bias)

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        routed = x
        if self._norms is not None:
            routed, x = self._norms(x)
        ids, weights = self._ops.route(self._router(routed, adapters), self._routing, self._correction, self._scales)
        # Before the experts, whose kernel adds it to their sum in float32.
        shared = None if self._shared is None else self._shared(x, adapters)
        gate = None if self._shared_gate is None else self._shared_gate(x, adapters)
        updates = None
        if adapters is not None and self._gate_up_lora is not None and self._down_lora is not None:
            updates = ExpertUpdates(adapters, self._gate_up_lora, self._down_lora)
        if self._narrow is None or self._widen is None:
            mixed = self.experts.mix(x, ids, weights, shared, gate, scale_x=self._scales_x, updates=updates)
            return self._ops.collective.columns(mixed, self._size)
        narrow = self._narrow(x, adapters)
        mixed = self.experts.mix(narrow, ids, weights, None, None, scale_x=self._scales_x, updates=updates)
        y = self._widen(mixed, adapters)
        return y if shared is None else self._ops.add_rows(y, shared, 1.0)


class _Norms(Generic[A]):
    """The norms of the inputs of router and experts."""

    def __init__(self, spec: MixtureSpec, eps: float, factory: WeightFactory[A]) -> None:
        names, hidden = spec.names, spec.hidden_size
        self._router = factory.float32(names.router_norm, Piece(hidden, whole=True), factor=hidden**-0.5)
        self._experts = Norm(NormSpec(names.experts_norm, hidden, eps), factory)
        self._eps, self._ops = eps, factory.ops

    def __call__(self, x: A) -> tuple[A, A]:
        return self._ops.rms_norm(x, self._router, self._eps), self._experts(x)


def _experts(
    spec: MixtureSpec, factory: WeightFactory[A]
) -> tuple[Experts[A], Sequence[LoraTable[A]] | None, Sequence[LoraTable[A]] | None]:
    """The experts, and the LoRA tables of their first maps and of their last."""
    names, size, inner = spec.names, spec.expert_size, spec.intermediate_size
    count = spec.routing.num_experts
    maps = (names.gate, names.up) if spec.gated else (names.up,)
    inners = (inner,) * len(maps)
    gate_up: list[LinearMap[A]] = []
    down: list[Weight[A]] = []
    for expert in range(count):
        at = factory.at(f"{names.experts}.{expert}")
        gate_up.append(at.linear(maps, inners, size, gated=spec.gated, activation=spec.activation))
        down.append(at.matrix(names.down, size, inner))
    top_k, interleaved = spec.routing.top_k, spec.interleaved
    tables = (
        factory.expert_lora(names.experts, maps, inners, size, gate_up, top_k=top_k, interleaved=interleaved),
        factory.expert_lora(names.experts, (names.down,), (size,), inner, down, top_k=top_k, interleaved=interleaved),
    )
    if not spec.bias:
        return factory.ops.new_experts(gate_up, down, None, None), *tables
    own_inner, own_size = (len(factory.ranks.own(total)) for total in (inner, size))
    gate_up_bias = factory.empty(count, own_inner * len(maps), dtype=gate_up[0].bias_dtype)
    down_bias = factory.empty(count, own_size, dtype=down[0].bias_dtype)
    for expert in range(count):
        at = factory.at(f"{names.experts}.{expert}")
        at.fill_bias(maps, inners, gate_up_bias[expert])
        at.fill_bias((names.down,), (size,), down_bias[expert])
    return factory.ops.new_experts(gate_up, down, gate_up_bias, down_bias), *tables
