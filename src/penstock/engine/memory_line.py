"""Formats the memory plan as one line for users."""

from penstock.config.byte_counts import in_words
from penstock.config.memory import ENCODERS, MemoryPlan
from penstock.system.weight_cache import WeightCache


def memory_line(plan: MemoryPlan, *, device: str = "cpu", ranks: int = 1) -> str:
    """The memory plan in one line: Memory: 92.1 MiB weights + up to 8 GiB KV cache (room for 372,800 tokens, ...)."""
    draft = f"; draft model: {_parts(plan.draft, device)}" if plan.draft is not None else ""
    whose = f" of each of {ranks} ranks" if ranks > 1 else ""
    return f"Memory{whose}: {_parts(plan, device)}{draft}"


def disk_part(cache: WeightCache | None) -> str:
    """The end of the line: what the folder of packed weights takes of the disk; empty if there is nothing in it."""
    try:
        held, most = (0, 0) if cache is None else cache.usage()
    except OSError:  # no such folder, or one of another user
        return ""
    words = f"; on disk {in_words(held)} of packed weights, of at most {in_words(most)} (`penstock cache` empties it)"
    return words if held else ""


def _parts(plan: MemoryPlan, device: str) -> str:
    parts = [f"{in_words(plan.weights)} weights"]
    if plan.adapters:
        parts.append(f"{in_words(plan.adapters)} adapters")
    if plan.towers:
        towers, kinds = " and ".join(ENCODERS[kind] for kind in plan.media), " and ".join(plan.media)
        parts.append(f"{in_words(plan.towers)} {towers} + {in_words(plan.image_features)} {kinds} features")
    if plan.image_pixels:
        kinds = " and ".join(f"{kind}s" for kind in plan.media)
        parts.append(f"{in_words(plan.image_pixels)} {kinds} of requests")
    parts.append(_cache(plan, on_demand=device == "cpu"))
    parts.append(f"{in_words(plan.workspace)} workspace")
    return " + ".join(parts)


def _cache(plan: MemoryPlan, *, on_demand: bool) -> str:
    size = in_words(plan.kv_cache)
    if not plan.is_cache:
        return f"{size} for the keys of a step (up to {plan.num_tokens:,} tokens; nothing is cached)"
    room = f"room for {plan.num_tokens:,} tokens"
    for group in plan.groups[1:]:
        if group.window is None:
            room += f" and {group.num_blocks:,} recurrent states"
        else:
            room += f", {group.num_blocks * plan.block_size:,} in layers with a window of {group.window:,}"
    filled = ", filled on demand" if on_demand else ""
    limit = f"; {plan.limited_by}" if plan.limited_by else ""
    return f"{'up to ' * on_demand}{size} KV cache ({room}{filled}{limit})"
