"""The mixture-of-experts layer."""

import torch
from torch import Tensor

from penstock.kernels.experts import Experts
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.lora.rows import AdapterRows
from penstock.layers.linear import Linear
from penstock.layers.mixture_spec import MixtureSpec
from penstock.layers.norm import Norm
from penstock.layers.spec import NormSpec
from penstock.quantization.base import WeightFactory


class Mixture:
    """A router, its experts and optional shared experts. See `FeedForward`."""

    def __init__(self, spec: MixtureSpec, factory: WeightFactory) -> None:
        names, experts = spec.names, spec.routing.num_experts
        self._routing, self._ops = spec.routing, factory.ops
        self._router = factory.linear((names.router,), (experts,), spec.hidden_size, whole=True)
        self._router_bias = None
        if spec.router_bias:
            self._router_bias = factory.bias((names.router,), (experts,), self._router.bias_dtype, whole=True)
        self._correction = factory.tensor(names.correction, experts, dtype=torch.float32) if spec.correction else None
        self._scales = None
        if spec.expert_scales:
            self._scales = factory.tensor(names.expert_scales, experts, dtype=torch.float32)
        self._norms = None if spec.norms_eps is None else _Norms(spec, spec.norms_eps, factory)
        self.experts = _experts(spec, factory)
        self._size = spec.expert_size
        self._scales_x = spec.scales_x
        self._shared = None if spec.shared is None else spec.shared.build(factory)
        self._shared_gate = None
        if spec.shared_gate:
            self._shared_gate = factory.linear((names.shared_gate,), (1,), spec.hidden_size, whole=True)
        self._narrow = self._widen = None
        if spec.latent is not None:
            assert self._shared_gate is None
            bias, hidden = spec.latent_bias, spec.hidden_size
            self._narrow = Linear((names.narrow,), hidden, (spec.latent,), factory, bias=bias, gives_all=True)
            self._widen = Linear(
                (names.widen,), spec.latent, (hidden,), factory, bias=bias, takes_own=True, gives_all=True
            )

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        routed = x
        if self._norms is not None:
            routed, x = self._norms(x)
        logits = self._router.linear(routed, self._router_bias, torch.float32)
        ids, weights = self._ops.route(logits, self._routing, self._correction, self._scales)
        shared = None if self._shared is None else self._shared(x, adapters)
        gate = None if self._shared_gate is None else self._shared_gate.linear(x, None, torch.float32)
        if self._narrow is None or self._widen is None:
            mixed = self.experts.mix(x, ids, weights, shared, gate, scale_x=self._scales_x)
            return self._ops.collective.columns(mixed, self._size)
        y = self._widen(self.experts.mix(self._narrow(x), ids, weights, None, None, scale_x=self._scales_x))
        return y if shared is None else self._ops.add_rows(y, shared, 1.0)


class _Norms:
    """The norms of the inputs of router and experts."""

    def __init__(self, spec: MixtureSpec, eps: float, factory: WeightFactory) -> None:
        names, hidden = spec.names, spec.hidden_size
        self._router = factory.tensor(names.router_norm, hidden, dtype=torch.float32, factor=hidden**-0.5)
        self._experts = Norm(NormSpec(names.experts_norm, hidden, eps), factory)
        self._eps, self._ops = eps, factory.ops

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.rms_norm(x, self._router, self._eps), self._experts(x)


def _experts(spec: MixtureSpec, factory: WeightFactory) -> Experts:
    names, size, inner = spec.names, spec.expert_size, spec.intermediate_size
    count = spec.routing.num_experts
    maps = (names.gate, names.up) if spec.gated else (names.up,)
    inners = (inner,) * len(maps)
    gate_up: list[LinearMap] = []
    down: list[Weight] = []
    for expert in range(count):
        at = factory.at(f"{names.experts}.{expert}")
        gate_up.append(at.linear(maps, inners, size, gated=spec.gated, activation=spec.activation))
        down.append(at.matrix(names.down, size, inner))
    if not spec.bias:
        return factory.ops.new_experts(gate_up, down, None, None)
    own_inner, own_size = (len(factory.ranks.own(total)) for total in (inner, size))
    gate_up_bias = factory.empty(count, own_inner * len(maps), dtype=gate_up[0].bias_dtype)
    down_bias = factory.empty(count, own_size, dtype=down[0].bias_dtype)
    for expert in range(count):
        at = factory.at(f"{names.experts}.{expert}")
        at.fill_bias(maps, inners, gate_up_bias[expert])
        at.fill_bias((names.down,), (size,), down_bias[expert])
    return factory.ops.new_experts(gate_up, down, gate_up_bias, down_bias)
