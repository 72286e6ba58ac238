"""Reading of the keys that the `config.json`s of mixtures of experts share."""

from typing import Any

from penstock.errors import CheckpointError
from penstock.feed_forward import MAX_EXPERTS, Routing
from penstock.models.hf_config import HFConfig


def read_routing(config: HFConfig, num_experts: int, top_k: int | None = None, **settings: Any) -> Routing:
    """A routing of `num_experts_per_tok` experts with these `settings` of `Routing`; of `top_k` where that is absent.

    Raises:
        CheckpointError: there are fewer experts than chosen ones, or more than supported.
    """
    top_k, groups = config.size("num_experts_per_tok", top_k), settings.get("groups", 1)
    kept = settings.get("top_groups", 1)
    size = num_experts // groups
    if num_experts > MAX_EXPERTS:
        raise CheckpointError(f"{config.file} names {num_experts} experts; at most {MAX_EXPERTS} are supported")
    if num_experts % groups or kept > groups or settings.get("group_tops", 1) > size:
        raise CheckpointError(
            f"{config.file}: {num_experts} experts cannot be chosen from {kept} of {groups} groups of equal size"
        )
    if top_k > size * kept:
        raise CheckpointError(
            f"{config.file}: num_experts_per_tok {top_k} is more than the {size * kept} to choose from"
        )
    return Routing(num_experts, top_k, **settings)
