"""Reads the `config.json` keys that mixtures of experts share."""

from collections.abc import Callable
from typing import Any

from penstock.config.feed_forward import MAX_EXPERTS, Routing
from penstock.errors import CheckpointError
from penstock.layers.mixture import MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.models.hf_config import HFConfig


def read_routing(
    config: HFConfig,
    num_experts: int,
    top_k: int | None = None,
    *,
    top_k_key: str = "num_experts_per_tok",
    **settings: Any,
) -> Routing:
    """Read the routing of a mixture of experts.

    Args:
        top_k: default of `top_k_key`; None: the key is required.
        settings: further fields of `Routing`.

    Raises:
        CheckpointError: the number of experts is less than `top_k_key`, not divisible into its groups, or
            larger than supported.
    """
    top_k, groups = config.size(top_k_key, top_k), settings.get("groups", 1)
    kept = settings.get("top_groups", 1)
    size = num_experts // groups
    if num_experts > MAX_EXPERTS:
        raise CheckpointError(f"{config.file} has {num_experts} experts; at most {MAX_EXPERTS} are supported")
    if num_experts % groups or kept > groups or settings.get("group_tops", 1) > size:
        raise CheckpointError(
            f"{config.file}: {num_experts} experts cannot be chosen from {kept} of {groups} groups of equal size"
        )
    if top_k > size * kept:
        raise CheckpointError(
            f"{config.file}: {top_k_key} {top_k} is more than the {size * kept} experts to choose from"
        )
    return Routing(num_experts, top_k, **settings)


def sigmoid_mixture(
    config: HFConfig,
    hidden_size: int,
    *,
    experts: tuple[str, int | None] = ("n_routed_experts", None),
    top_k: int | None = None,
    shared: tuple[str, int | None] = ("n_shared_experts", None),
    inner: int,
    renormalize: bool = True,
    scaling: float = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> MixtureSpec:
    """Read DeepSeek V3's mixture of experts: sigmoid routing with a correction bias, in groups, and a shared expert.

    Args:
        experts, shared: keys of the numbers of experts and of shared experts, with their defaults; None: required.
        top_k, inner, renormalize, scaling, groups: the family's defaults; the last, of all groups and of the best.

    Raises:
        CheckpointError: as `read_routing`.
    """
    routing = read_routing(
        config,
        config.size(*experts),
        top_k,
        score="sigmoid",
        renormalize=config.get("norm_topk_prob", renormalize),
        epsilon=1e-20,
        scaling=config.positive("routed_scaling_factor", scaling),
        groups=config.size("n_group", groups[0]),
        top_groups=config.size("topk_group", groups[1]),
        group_tops=2,
    )
    inner = config.size("moe_intermediate_size", inner)
    return MixtureSpec(
        hidden_size,
        inner,
        routing,
        correction=True,
        shared=shared_experts(hidden_size, inner * config.size(*shared)),
    )


def shared_experts(hidden_size: int, intermediate_size: int) -> GatedMLPSpec:
    """The shared experts of DeepSeek and others: one MLP."""
    return GatedMLPSpec(
        hidden_size,
        intermediate_size,
        gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        down="mlp.shared_experts.down_proj",
    )


def sparse_layers(config: HFConfig, num_layers: int, usual: Callable[[int], bool]) -> list[bool]:
    """Whether each layer has experts: by `mlp_layer_types`, or else by `usual` of its index.

    Raises:
        CheckpointError: `mlp_layer_types` does not name a known kind for each layer.
    """
    kinds = config.get("mlp_layer_types", ["sparse" if usual(index) else "dense" for index in range(num_layers)])
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"mlp_layer_types in {config.file} must name dense or sparse for each of the {num_layers} layers"
        )
    return [kind == "sparse" for kind in kinds]
