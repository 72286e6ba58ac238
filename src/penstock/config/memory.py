"""The memory plan: bytes of weights, KV cache and workspace, from facts of the model and the machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from penstock.api.request import MediaKind
from penstock.config.byte_counts import GIB, MIB, in_words, parse_bytes
from penstock.config.footprint import PACKED_BYTES, PoolLimits, weight_bytes, workspace_bytes
from penstock.config.image_settings import largest_image_bytes
from penstock.config.machine import Machine
from penstock.config.model_facts import (
    BYTES_OF,
    CacheSpec,
    KVSpec,
    ModelPrecision,
    StateSpec,
    TowerFacts,
)
from penstock.dataclass import dataclass
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same part of each sequence's context, in blocks of one pool."""

    layers: tuple[int, ...]
    window: int | None
    """Number of keys that a query sees, including its own; None: all."""
    num_blocks: int
    checkpoint_every: int | None = None
    """Blocks between the checkpoints that the prefix cache always keeps, for layers with states."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The engine's memory by use, in bytes. The KV cache is allocated once; all else stays within the plan."""

    weights: int
    kv_cache: int
    workspace: int
    groups: tuple[LayerGroup, ...]
    """Groups of layers, the main group first: see `penstock.core.kv_manager`."""
    block_size: int
    limited_by: str = ""
    """The limit that determined the size of the KV cache, with the option to change; for messages."""
    is_cache: bool = True
    """False for an encoder, whose keys and values last for one step."""
    adapters: int = 0
    """Bytes for the weights of adapters; 0: none can be loaded."""
    towers: int = 0
    """Bytes of the weights of its vision tower and audio encoder; 0: the model takes text only."""
    image_features: int = 0
    """Bytes for the features of encoded images or sounds, and for the streams of those that are being encoded."""
    image_pixels: int = 0
    """Bytes for the images of open requests, encoded or not; 0: unknown, as on a GPU, whose host has them."""
    media: tuple[MediaKind, ...] = ()
    """Kinds of media that the model takes."""
    draft: "MemoryPlan | None" = None
    """The draft model's plan, whose bytes are not included here; it has as many blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the main group."""
        return self.groups[0].num_blocks

    @property
    def num_bytes(self) -> int:
        """All bytes of the plan, with those of the draft model."""
        draft = 0 if self.draft is None else self.draft.num_bytes
        cache = self.kv_cache + self.adapters + self.towers + self.image_features + self.image_pixels
        return self.weights + cache + self.workspace + draft

    def with_fewer_blocks(self, num_blocks: int) -> "MemoryPlan":
        """The plan with at most this many blocks per group; the number of states does not change."""
        groups = tuple(
            replace(group, num_blocks=min(num_blocks, group.num_blocks)) if group.checkpoint_every is None else group
            for group in self.groups
        )
        return replace(self, groups=groups)

    @property
    def num_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.num_blocks * self.block_size


ENCODERS: dict[MediaKind, str] = {"image": "vision tower", "sound": "audio encoder"}
"""Name of the encoder of each kind of media."""
_MOST_RANKS = 3 * 256  # of the maps that share an input
_AUTO_KV_CEILING = 8 * GIB  # on a CPU, whose memory others use too


@dataclass(frozen=True, slots=True)
class Demand:
    """The machine's memory, and the bytes needed besides the KV cache."""

    machine: Machine
    weights: int
    workspace: int
    adapters: int = 0
    images: int = 0
    """Bytes of the weights of the vision tower and audio encoder, of features and of pixels."""
    media: tuple[MediaKind, ...] = ()

    @property
    def needed(self) -> int:
        return self.weights + self.workspace + self.adapters + self.images

    @property
    def free(self) -> int:
        return self.machine.memory - self.needed

    @property
    def taken(self) -> str:
        memory = in_words(self.machine.memory)
        has = f"max_memory is {memory}" if self.machine.is_limited else f"{memory} are free"
        adapters = f", adapters {in_words(self.adapters)}" if self.adapters else ""
        encoder = " and ".join([*(ENCODERS[kind] for kind in self.media), *(f"{kind}s" for kind in self.media)])
        images = f", the {encoder} {in_words(self.images)}" if self.images else ""
        takes = f"weights take {in_words(self.weights)}, the workspace {in_words(self.workspace)}"
        return f"{has}, {takes}{adapters}{images}"

    def remedy(self, cache: int, lower: str) -> str:
        """Advice for the case that a cache of this many bytes does not fit.

        Args:
            lower: the options that reduce workspace and cache.
        """
        if self.machine.is_limited:
            needed = in_words(self.needed + cache)
            more = f"raise max_memory to more than {needed} (with several engines, run fewer)"
            return more if self.weights > self.machine.memory else f"{more}, or lower {lower}"
        if self.weights > self.machine.memory:
            return "the weights alone do not fit: take a smaller model, or one quantized to fewer bits"
        return f"lower {lower}"


def plan_memory(
    kv_cache_memory: str | int,
    machine: Machine,
    models: Sequence[ModelPrecision],
    limits: PoolLimits,
    *,
    num_drafts: int,
    adapters: int = 0,
) -> MemoryPlan:
    """Divide the machine's memory for a model and its draft model, if any.

    Both get the same number of blocks, as they cache the same tokens.

    Args:
        kv_cache_memory: bytes for both, in the format of `parse_bytes`, or "auto".
        num_drafts: a step samples at most `max_num_seqs + num_drafts` tokens.
        adapters: bytes for adapters of the first model.

    Raises:
        ConfigError: the models do not fit the machine.
    """
    # Each running sequence samples once, and each draft once more.
    samples = limits.max_num_seqs + num_drafts
    limits = replace(limits, num_branches=most_branches(limits.max_num_seqs, num_drafts))
    weights = [weight_bytes(model, machine) for model in models]
    workspaces = [workspace_bytes(model, limits, samples, machine) for model in models]
    if adapters:
        workspaces[0] += (limits.budget + samples) * 4 * (models[0].facts.adapted_rows + _MOST_RANKS)
        # The output projection may have an adapter, too.
        workspaces[0] += samples * 4 * models[0].facts.vocab_size
    towers, image_features, image_pixels = 0, 0, 0
    facts = models[0].facts.towers
    if facts:
        towers = sum(int(tower.num_parameters * PACKED_BYTES[models[0].dtype]) for tower in facts.values())
        image_features = _feature_bytes(models[0], facts, machine)
        image_pixels = _pixel_bytes(facts, machine)
        workspaces[0] += sum(_tower_workspace(models[0], tower, machine) for tower in facts.values())
    images = towers + image_features + image_pixels
    demand = Demand(machine, sum(weights), sum(workspaces), adapters, images, tuple(facts))
    num_blocks, limit = _num_blocks(kv_cache_memory, demand, models, limits)
    first, *others = (
        MemoryPlan(
            weights=weights[index],
            kv_cache=_pool_bytes(model, limits, num_blocks),
            workspace=workspaces[index],
            groups=layer_groups(model.facts.caches, limits, num_blocks),
            block_size=limits.block_size,
            limited_by=limit,
        )
        for index, model in enumerate(models)
    )
    draft = others[0] if others else None
    return replace(
        first,
        adapters=adapters,
        towers=towers,
        image_features=image_features,
        image_pixels=image_pixels,
        media=tuple(facts),
        draft=draft,
    )


_LARGEST_IMAGES = 2
"""Number of the largest images whose features fit their budget at least: one in use, one being encoded."""
_AUTO_FEATURES = 64 * MIB
_AUTO_PIXELS = 512 * MIB
_WINDOWS = 16
"""Number of audio windows whose keys fit their budget, memory permitting: as many as are decoded at a time."""


def _feature_bytes(model: ModelPrecision, towers: Mapping[MediaKind, TowerFacts], machine: Machine) -> int:
    """The budget for features."""
    largest = max(largest_image_bytes(tower, BYTES_OF[model.dtype]) for tower in towers.values())
    if any(tower.is_attended for tower in towers.values()):
        return largest * max(_LARGEST_IMAGES, min(_WINDOWS, machine.memory // 16 // largest))
    return max(_LARGEST_IMAGES * largest, min(_AUTO_FEATURES, machine.memory // 64))


def _pixel_bytes(towers: Mapping[MediaKind, TowerFacts], machine: Machine) -> int:
    """The budget for the images of open requests."""
    if machine.device != "cpu":
        return 0
    largest = max(tower.largest_pixels for tower in towers.values())
    return max(_LARGEST_IMAGES * largest, min(_AUTO_PIXELS, machine.memory // 32))


def _tower_workspace(model: ModelPrecision, tower: TowerFacts, machine: Machine) -> int:
    """Bytes of the largest image's pixels, of its activations, and of its keys and values in one layer."""
    native = machine.device == "cpu" and machine.native
    activations = tower.activation_sizes.native if native else tower.activation_sizes.reference
    patch = (activations + 4 * tower.hidden_size) * BYTES_OF[model.dtype] + 4 * tower.activation_sizes.widest
    return tower.max_patches * (patch + 2 * 4 * tower.patch_elements)


def plan_encoder_memory(machine: Machine, model: ModelPrecision, limits: PoolLimits) -> MemoryPlan:
    """Divide the machine's memory for an encoder, which caches nothing: all layers share one layer's keys and values.

    Args:
        limits: the budget counts each text rounded up to whole blocks; a longer text is computed alone.

    Raises:
        ConfigError: the model does not fit the machine.
    """
    facts, block_size = model.facts, limits.block_size
    num_blocks = -(-max(limits.budget, limits.max_model_len) // block_size)
    weights = weight_bytes(model, machine)
    workspace = workspace_bytes(model, replace(limits, budget=num_blocks * block_size), 0, machine)
    keys = num_blocks * max(
        (cache.block_bytes(block_size, model.kv_dtype) for cache in facts.caches if cache), default=0
    )
    if weights + workspace + keys > machine.memory:
        demand = Demand(machine, weights, workspace + keys)
        longest = f"the longest text, of {limits.max_model_len:,} tokens,"
        raise ConfigError(f"{longest} does not fit: {demand.taken}; {demand.remedy(0, 'max_model_len')}")
    groups = (LayerGroup(tuple(range(len(facts.layers))), None, num_blocks),)
    return MemoryPlan(weights, keys, workspace, groups, block_size, is_cache=False)


def most_branches(max_num_seqs: int, num_drafts: int) -> int:
    """Maximum number of sequences with drafts in one step.

    With r running sequences, a step has at most `max_num_seqs + num_drafts - r` draft tokens.
    """
    return min(max_num_seqs, (max_num_seqs + num_drafts) // 2) if num_drafts else 0


def layer_groups(caches: Sequence[CacheSpec | None], limits: PoolLimits, num_blocks: int) -> tuple[LayerGroup, ...]:
    """Group the layers by cache kind and window. The main group has the largest window and `num_blocks` blocks.

    It is first; groups with smaller windows follow, then those with states. A window that covers the longest text
    counts as none.
    Layers without a cache belong to no group.

    Raises:
        ConfigError: no layer caches keys.
    """
    seen = {layer: _window(cache, limits) for layer, cache in enumerate(caches) if isinstance(cache, KVSpec)}
    if not seen:
        raise ConfigError("no layer of this model has attention: models of recurrent layers alone are not supported")
    in_order = sorted(set(seen.values()), key=lambda window: -limits.max_model_len if window is None else -window)
    groups = [
        LayerGroup(
            layers=tuple(layer for layer, layer_window in seen.items() if layer_window == window),
            window=window,
            num_blocks=num_blocks if window == in_order[0] else _bounded_blocks(window, limits, num_blocks),
        )
        for window in in_order
    ]
    return (*groups, *_state_groups(caches, groups[0], limits))


def _window(cache: KVSpec, limits: PoolLimits) -> int | None:
    return None if cache.window is None or cache.window >= limits.max_model_len else cache.window


def _bounded_blocks(window: int | None, limits: PoolLimits, num_blocks: int) -> int:
    """Blocks of a group with a window smaller than the main group's, which has `num_blocks`.

    They suffice for the windows of all sequences and the tokens of a step together, so the group never runs out. In
    addition, the prefix cache may keep windows for a quarter of its blocks in the main group. A sequence has a block
    here only where it has one in the main group, so the main group's number is always enough.
    """
    assert window is not None, "a group without a window is the main one"
    a_sequence = -(-(window - 1) // limits.block_size) + 3
    held = limits.max_num_seqs * a_sequence + -(-limits.budget // limits.block_size)
    return min(num_blocks, held + num_blocks // 4)


_STATES_SHARE = 4
"""Bytes of a text's keys, in 16 bits, per byte of the checkpoints that are kept with them."""


def _state_groups(caches: Sequence[CacheSpec | None], main: LayerGroup, limits: PoolLimits) -> Iterator[LayerGroup]:
    """One group of layers per kind of state.

    Each sequence has one state, or two in a step with drafts, and `core.states` uses these blocks for nothing else, so
    the group never runs out. Further blocks hold checkpoints for the prefix cache, spaced so that all checkpoints of a
    text take a quarter of the bytes of its keys.
    """
    in_main = (caches[layer] for layer in main.layers)
    keys = sum(cache.block_bytes(limits.block_size, "bfloat16") for cache in in_main if cache is not None)
    kinds = dict.fromkeys(cache for cache in caches if isinstance(cache, StateSpec))
    for kind in kinds:
        layers = tuple(layer for layer, cache in enumerate(caches) if cache == kind)
        state = len(layers) * kind.block_bytes(limits.block_size, "float32")
        every = -(-_STATES_SHARE * state // keys)
        num_blocks = limits.max_num_seqs + limits.num_branches + -(-main.num_blocks // every)
        yield LayerGroup(layers, None, num_blocks, every)


def _num_blocks(
    wanted: str | int, demand: Demand, models: Sequence[ModelPrecision], limits: PoolLimits
) -> tuple[int, str]:
    """Number of the main group's blocks that fit the free memory, and the limit that determined it, for messages.

    Args:
        wanted: bytes of the KV cache, or "auto": at most those that `max_num_seqs` texts of maximum length can use.
    """
    kv_cache, limit = _kv_cache_bytes(wanted, demand)
    num_blocks = _most_blocks(models, limits, kv_cache)
    most = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size)
    # More blocks could only cache more prefixes, and other processes need memory, too.
    if wanted == "auto" and num_blocks > most:
        num_blocks = most
        limit = f"all that --max-num-seqs {limits.max_num_seqs} of --max-model-len {limits.max_model_len} can use"
    if num_blocks < 1:
        has_states = any(model.facts.state_bytes for model in models)
        least = sum(_pool_bytes(model, limits, 1) for model in models)
        lower = f"{'max_num_seqs, ' * has_states}max_model_len, max_num_batched_tokens or block_size"
        what = f"no KV block of {limits.block_size} tokens ({in_words(least)}) fits"
        if wanted == "auto":
            raise ConfigError(f"{what}: {demand.taken}; {demand.remedy(least, lower)}")
        raise ConfigError(f"{what}: kv_cache_memory is {in_words(kv_cache)}: raise it; or lower {lower}")
    return num_blocks, limit


def _most_blocks(models: Sequence[ModelPrecision], limits: PoolLimits, kv_cache: int) -> int:
    """Maximum number of the main group's blocks with which the pools of all models fit `kv_cache` bytes."""
    low, high = 0, max(1, kv_cache)
    # By bisection: pools grow in steps with the number of blocks, and those of windows stop growing.
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_pool_bytes(model, limits, middle) for model in models) <= kv_cache:
            low = middle
        else:
            high = middle - 1
    return low


def _kv_cache_bytes(wanted: str | int, demand: Demand) -> tuple[int, str]:
    """Bytes of the KV cache within the free memory, and the limit that determined them, for messages."""
    free = demand.free
    if wanted == "auto":
        if demand.machine.device != "cpu":
            return int(free * 0.9), "90 % of what is left; --kv-cache-memory"
        if free * 0.6 <= _AUTO_KV_CEILING:
            return int(free * 0.6), "60 % of what is left; --kv-cache-memory"
        return _AUTO_KV_CEILING, "--kv-cache-memory"
    count = parse_bytes(wanted)
    if count > free:
        lower = "kv_cache_memory" if free <= 0 else f"kv_cache_memory to at most {in_words(free)}"
        raise ConfigError(
            f"kv_cache_memory {in_words(count)} does not fit: {demand.taken}; {demand.remedy(count, lower)}"
        )
    return count, "--kv-cache-memory"


def _pool_bytes(model: ModelPrecision, limits: PoolLimits, num_blocks: int) -> int:
    """Bytes of the pools of all groups if the main group has this many blocks."""
    caches = model.facts.caches
    hidden = model.facts.hidden_size * BYTES_OF[model.dtype] if model.keeps_hidden else 0
    return (num_blocks * limits.block_size + 1 + limits.max_num_seqs) * hidden + sum(
        group.num_blocks * cache.block_bytes(limits.block_size, model.kv_dtype)
        for group in layer_groups(caches, limits, num_blocks)
        for cache in map(caches.__getitem__, group.layers)
        if cache is not None
    )
