"""Reads the `config.json` keys that mixtures of experts share."""

from typing import Any

from penstock.config.feed_forward import MAX_EXPERTS, Routing
from penstock.errors import CheckpointError
from penstock.models.hf_config import HFConfig


def read_routing(config: HFConfig, num_experts: int, top_k: int | None = None, **settings: Any) -> Routing:
    """Read the routing of a mixture of experts.

    Args:
        top_k: default of `num_experts_per_tok`; None: the key is required.
        settings: further fields of `Routing`.

    Raises:
        CheckpointError: the number of experts is less than `num_experts_per_tok`, not divisible into its groups, or
            larger than supported.
    """
    top_k, groups = config.size("num_experts_per_tok", top_k), settings.get("groups", 1)
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
            f"{config.file}: num_experts_per_tok {top_k} is more than the {size * kept} experts to choose from"
        )
    return Routing(num_experts, top_k, **settings)
