"""What models take of a machine's memory, and how it is divided: facts in, bytes out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from penstock.errors import ConfigError
from penstock.recipes import RECIPES
from penstock.state_layout import part_elements
from penstock.weight_formats import FLOAT, WeightFormat

DType = Literal["float32", "bfloat16", "float16"]
BYTES_OF: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KVDType = Literal["float32", "bfloat16", "float16", "int8"]

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a model."""

    name: str
    """In the checkpoint, without `.weight`."""
    rows: int
    columns: int
    format: WeightFormat
    """In which the checkpoint stores it."""
    multiplied: bool = True
    """False: rows of it are looked up, and that is all."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values that a layer keeps of each token."""

    num_heads: int
    """Of keys, and as many of values."""
    head_dim: int
    window: int | None = None
    """How many keys a query sees, its own included; None: all."""
    latent: bool = False
    """The values are the keys as they are kept: there are no others."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's pool."""
        return block_size * (2 - self.latent) * self.num_heads * head_bytes(self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size that a layer keeps of each sequence, in float32."""

    parts: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that it is made of."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's pool: one state, each part from a multiple of 64 bytes on."""
        return 4 * sum(map(part_elements, self.parts))


@dataclass(frozen=True, slots=True)
class SharedKV:
    """Keys and values of another layer, which are kept once, there."""

    layer: int
    """Its index."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's own pool."""
        return 0


CacheSpec: TypeAlias = KVSpec | StateSpec | SharedKV


def head_bytes(head_dim: int, dtype: KVDType) -> int:
    """Bytes of one head's key, or value, of a token: those of int8 have a scale."""
    return head_dim + 4 if dtype == "int8" else head_dim * BYTES_OF[dtype]


@dataclass(frozen=True, slots=True)
class Working:
    """Elements of a token's intermediate results in a part of a layer, beside the hidden states."""

    native: int
    """With the native kernels."""
    reference: int
    """With those in plain torch."""
    widest: int
    """Input of a linear map, which kernels round to integers as a copy."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the memory plan needs to know of a layer."""

    cache: CacheSpec | None
    """What it keeps of a sequence; None: nothing."""
    working: tuple[Working, ...]
    """Of each of its parts."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve` needs to know of a checkpoint."""

    name: str
    dtype: DType
    """The checkpoint's own."""
    num_parameters: int
    max_position: int
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerFacts, ...]
    rotary_dim: int
    """Elements that are rotated by position, summed over the tables of angles that the model has."""
    matrices: tuple[Matrix, ...]
    stored_format: str | None = None
    """The checkpoint's name for how they are quantized; None: they are not."""
    adapted_rows: int = 0
    """Of the matrices that adapters may add to, summed over the kinds of parts of layers."""
    kv_dtype: KVDType | None = None
    """What keys and values are cached in by default; None: the dtype of the arithmetic."""
    is_encoder: bool = False
    """Whether it embeds or scores, and keeps nothing of a text."""

    @property
    def caches(self) -> tuple[CacheSpec | None, ...]:
        """What each layer keeps."""
        return tuple(layer.cache for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence; 0 for a model without recurrent layers."""
        return sum(cache.block_bytes(1, "float32") for cache in self.caches if isinstance(cache, StateSpec))


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same part of each sequence's context, in blocks of one pool."""

    layers: tuple[int, ...]
    window: int | None
    """How many keys a query sees, its own included; None: all."""
    num_blocks: int
    checkpoint_every: int | None = None
    """Of layers that keep a state: the prefix cache keeps one after so many blocks, whatever others it keeps."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What `resolve` needs to know of the machine."""

    device: str
    """cpu, cuda or cuda:N: what the engine will run on."""
    cores: int
    """Physical ones that this process may use."""
    memory: int
    """Bytes free for the engine on `device`."""
    native: bool = False
    """Whether the native CPU kernels are there."""
    multiplies_bfloat16: bool = False
    """Whether they multiply bfloat16, of which they hold weights in 12 bits then."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes go. The engine allocates the KV cache once and stays within the rest."""

    weights: int
    kv_cache: int
    workspace: int
    groups: tuple[LayerGroup, ...]
    """The main one first: see `penstock.core.kv_manager`."""
    block_size: int
    limited_by: str = ""
    """What the size of the KV cache was decided by, in words."""
    adapters: int = 0
    """For the weights of adapters; 0: none can be loaded."""
    draft: "MemoryPlan | None" = None
    """The draft model's, beside these bytes. It has as many blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the main group."""
        return self.groups[0].num_blocks

    def with_fewer_blocks(self, num_blocks: int) -> "MemoryPlan":
        """The plan with at most so many blocks a group; with as many states."""
        groups = tuple(
            replace(group, num_blocks=min(num_blocks, group.num_blocks)) if group.checkpoint_every is None else group
            for group in self.groups
        )
        return replace(self, groups=groups)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values the pool holds."""
        return self.num_blocks * self.block_size

    def describe(self) -> str:
        """One line for people: the plan that is printed at start."""
        pool = f"{self.num_tokens:,} tokens in {self.num_blocks:,} blocks of {self.block_size}"
        for group in self.groups[1:]:
            if group.window is None:
                pool += f"; {group.num_blocks:,} states of {len(group.layers)} layers"
            else:
                pool += f"; {group.num_blocks:,} blocks of {len(group.layers)} layers with a window of {group.window:,}"
        pool += f", limited by {self.limited_by}" if self.limited_by else ""
        draft = f"; draft model: {self.draft._parts()}" if self.draft is not None else ""
        return f"memory plan: {self._parts()}; {pool}{draft}"

    def _parts(self) -> str:
        adapters = f", adapters {_size(self.adapters)}" if self.adapters else ""
        return (
            f"weights {_size(self.weights)}{adapters}, KV cache {_size(self.kv_cache)}, workspace "
            f"{_size(self.workspace)}"
        )


@dataclass(frozen=True, slots=True)
class ModelPrecision:
    """A model and how it is computed."""

    facts: ModelFacts
    dtype: DType
    kv_dtype: KVDType
    quantization: str | None
    """The recipe that matrices are rounded by as they are loaded; None: they stay as stored."""
    keeps_hidden: bool = False
    """Beside the keys of a token its hidden state is kept, for a head that guesses further tokens."""


_MOST_RANKS = 3 * 256  # of the maps that share an input
_AUTO_KV_CEILING = 8 * GIB  # on a CPU, whose memory others use too


def plan_memory(
    kv_cache_memory: str | int,
    block_size: int,
    machine: Machine,
    models: Sequence[ModelPrecision],
    *,
    max_model_len: int,
    max_num_seqs: int,
    budget: int,
    num_drafts: int,
    adapters: int = 0,
) -> MemoryPlan:
    """Where the bytes of the model go, and of a second one that drafts for it.

    Both have as many blocks, so that whatever the one keeps the other can.

    Args:
        kv_cache_memory: bytes for both, as `parse_bytes` takes them, or "auto".
        budget: tokens that one step computes; it samples at most `max_num_seqs + num_drafts`.
        adapters: bytes for adapters of the first model.

    Raises:
        ConfigError: it does not fit the machine.
    """
    on_cpu = machine.device == "cpu"
    native = on_cpu and machine.native and block_size % 2 == 0
    samples = max_num_seqs + num_drafts
    limits = PoolLimits(max_model_len, max_num_seqs, budget, block_size)
    weights = [_weight_bytes(model, machine) for model in models]
    workspaces = [
        _workspace(model.facts, BYTES_OF[model.dtype], max_model_len, samples, budget, machine.cores, native)
        for model in models
    ]
    if adapters:
        workspaces[0] += (budget + samples) * 4 * (models[0].facts.adapted_rows + _MOST_RANKS)
    told = (
        f"{_size(machine.memory)} are free, of which weights take {_size(sum(weights))}, the workspace "
        f"{_size(sum(workspaces))}{f', adapters {_size(adapters)}' * bool(adapters)}"
    )
    free = machine.memory - sum(weights) - sum(workspaces) - adapters
    kv_cache, limit = _kv_cache_bytes(kv_cache_memory, free, on_cpu, told)
    num_blocks = _most_blocks(models, limits, kv_cache)
    most = max_num_seqs * -(-max_model_len // block_size)
    if kv_cache_memory == "auto" and num_blocks > most:
        num_blocks = most
        limit = f"max_num_seqs ({max_num_seqs}) sequences of max_model_len ({max_model_len:,}) tokens"
    if num_blocks < 1:
        raise ConfigError(
            f"no KV block of {block_size} tokens ({_size(sum(_pool_bytes(model, limits, 1) for model in models))}) "
            f"fits: {told}; lower {'max_num_seqs, ' * any(model.facts.state_bytes for model in models)}max_model_len, "
            "max_num_batched_tokens or block_size"
        )
    first, *others = (
        MemoryPlan(
            weights=weights[place],
            kv_cache=_pool_bytes(model, limits, num_blocks),
            workspace=workspaces[place],
            groups=layer_groups(model.facts.caches, limits, num_blocks),
            block_size=block_size,
            limited_by=limit,
        )
        for place, model in enumerate(models)
    )
    return replace(first, adapters=adapters, draft=others[0] if others else None)


def plan_encoder_memory(
    block_size: int, machine: Machine, model: ModelPrecision, *, max_model_len: int, budget: int
) -> MemoryPlan:
    """Where the bytes of an encoder go. It caches nothing: each layer writes a step's keys and values over the last's.

    Args:
        budget: tokens that a step computes, those that fill a text's last block included; a longer text goes alone.

    Raises:
        ConfigError: it does not fit the machine.
    """
    facts = model.facts
    num_blocks = -(-max(budget, max_model_len) // block_size)
    tokens = num_blocks * block_size
    native = machine.device == "cpu" and machine.native and block_size % 2 == 0
    weights = _weight_bytes(model, machine)
    workspace = _workspace(facts, BYTES_OF[model.dtype], max_model_len, 0, tokens, machine.cores, native)
    keys = num_blocks * max(cache.block_bytes(block_size, model.kv_dtype) for cache in facts.caches if cache)
    if weights + workspace + keys > machine.memory:
        raise ConfigError(
            f"{_size(machine.memory)} are free, but weights take {_size(weights)}, and a text of {max_model_len:,} "
            f"tokens {_size(workspace + keys)}: lower max_model_len"
        )
    groups = (LayerGroup(tuple(range(len(facts.layers))), None, num_blocks),)
    return MemoryPlan(weights, keys, workspace, groups, block_size, "the tokens of a step, which are all that is kept")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a step may compute, on which the sizes of the pools depend."""

    max_model_len: int
    max_num_seqs: int
    budget: int
    """Tokens that one step computes."""
    block_size: int


def layer_groups(caches: Sequence[CacheSpec | None], limits: PoolLimits, num_blocks: int) -> tuple[LayerGroup, ...]:
    """The layers by what they keep, with `num_blocks` blocks for the group that sees most keys, the main one.

    Then come those with smaller windows, then those that keep states. A window that no text outgrows is none. Layers
    that keep nothing are in no group.

    Raises:
        ConfigError: no layer keeps keys.
    """
    seen = {layer: _window(cache, limits) for layer, cache in enumerate(caches) if isinstance(cache, KVSpec)}
    if not seen:
        raise ConfigError("no layer of this model has attention: models of recurrent layers alone are not supported")
    in_order = sorted(set(seen.values()), key=lambda window: -limits.max_model_len if window is None else -window)
    groups = [
        LayerGroup(
            layers=tuple(layer for layer, one in seen.items() if one == window),
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

    Enough for what all sequences see, and the step adds, at one time: so that group never runs short. Besides, the
    prefix cache may keep the windows of a quarter of what it keeps in the main group. A sequence has blocks only where
    it has blocks of the main group, so as many as that one has are always enough.
    """
    assert window is not None, "a group without a window is the main one"
    a_sequence = -(-(window - 1) // limits.block_size) + 3
    held = limits.max_num_seqs * a_sequence + -(-limits.budget // limits.block_size)
    return min(num_blocks, held + num_blocks // 4)


_STATES_SHARE = 4
"""Bytes of keys, in 16 bits, to one of the checkpoints that are kept beside them."""


def _state_groups(caches: Sequence[CacheSpec | None], main: LayerGroup, limits: PoolLimits) -> Iterator[LayerGroup]:
    """The layers that keep states, by their kind.

    Each sequence has one state, and `core.states` takes no block for anything else that a sequence may want: so such a
    group never runs short. Besides, there are checkpoints for the prefix cache, as far apart that all those of a text
    take a quarter of what its keys take.
    """
    in_main = (caches[layer] for layer in main.layers)
    keys = sum(cache.block_bytes(limits.block_size, "bfloat16") for cache in in_main if cache is not None)
    kinds = dict.fromkeys(cache for cache in caches if isinstance(cache, StateSpec))
    for kind in kinds:
        layers = tuple(layer for layer, cache in enumerate(caches) if cache == kind)
        state = len(layers) * kind.block_bytes(limits.block_size, "float32")
        every = -(-_STATES_SHARE * state // keys)
        yield LayerGroup(layers, None, limits.max_num_seqs + -(-main.num_blocks // every), every)


def _most_blocks(models: Sequence[ModelPrecision], limits: PoolLimits, kv_cache: int) -> int:
    """The most blocks of the main group with which the pools of all models take at most `kv_cache` bytes."""
    low, high = 0, max(1, kv_cache)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_pool_bytes(model, limits, middle) for model in models) <= kv_cache:
            low = middle
        else:
            high = middle - 1
    return low


def _kv_cache_bytes(wanted: str | int, free: int, on_cpu: bool, told: str) -> tuple[int, str]:
    """What the KV cache gets of the bytes that weights and workspace leave free, and what that was decided by."""
    if wanted == "auto":
        if not on_cpu:
            return int(free * 0.9), "90 % of the memory that is left"
        if free * 0.6 <= _AUTO_KV_CEILING:
            return int(free * 0.6), "60 % of the memory that is left"
        return _AUTO_KV_CEILING, f"the default's {_size(_AUTO_KV_CEILING)} (kv_cache_memory)"
    count = parse_bytes(wanted)
    if count > free:
        raise ConfigError(f"kv_cache_memory {_size(count)} does not fit: {told}")
    return count, "kv_cache_memory"


def _pool_bytes(model: ModelPrecision, limits: PoolLimits, num_blocks: int) -> int:
    """Bytes of the pools of all groups, if the main one has so many blocks."""
    caches = model.facts.caches
    hidden = model.facts.hidden_size * BYTES_OF[model.dtype] if model.keeps_hidden else 0
    return num_blocks * limits.block_size * hidden + sum(
        group.num_blocks * cache.block_bytes(limits.block_size, model.kv_dtype)
        for group in layer_groups(caches, limits, num_blocks)
        for cache in map(caches.__getitem__, group.layers)
        if cache is not None
    )


_PACKED_BYTES: dict[DType, float] = {"float32": 4.0, "bfloat16": 65 / 32, "float16": 65 / 32}
"""Of an element in floating point with its share of scales, as the native kernels pack matrices."""
_PACKED_BFLOAT16_BYTES = 1.52
"""The same of bfloat16, where the kernels multiply it."""


def _weight_bytes(model: ModelPrecision, machine: Machine) -> int:
    facts = model.facts
    recipe = None if model.quantization is None else RECIPES[model.quantization]
    matrices = sum(
        _matrix_bytes(matrix, recipe.format_of(matrix.name) if recipe else matrix.format, model.dtype, machine)
        for matrix in facts.matrices
    )
    rest = facts.num_parameters - sum(matrix.rows * matrix.columns for matrix in facts.matrices)
    return int(matrices) + rest * BYTES_OF[model.dtype]


def _matrix_bytes(matrix: Matrix, format: WeightFormat, dtype: DType, machine: Machine) -> float:
    """Bytes of a matrix with its scales, as the machine's kernels keep it."""
    native = machine.device == "cpu" and machine.native
    elements = matrix.rows * matrix.columns
    if format is not FLOAT:
        if native:
            return format.packed_bytes(matrix.rows, matrix.columns)
        return elements + 8 * matrix.rows * format.num_groups(matrix.columns)  # a byte each; scale and zero are float32
    if not native or not matrix.multiplied:
        return elements * BYTES_OF[dtype]
    if dtype == "bfloat16" and machine.multiplies_bfloat16:
        return elements * _PACKED_BFLOAT16_BYTES
    return elements * _PACKED_BYTES[dtype]


def _workspace(
    facts: ModelFacts, size: int, max_model_len: int, samples: int, budget: int, cores: int, native: bool
) -> int:
    """An upper estimate of a step's temporary bytes, and of the tables of rotary positions.

    The reference kernels gather the context of a step's sequences densely, so that part dominates at long contexts;
    the native ones read it where it lies, and keep the scores of a superblock of 512 keys in each thread.
    """
    parts = {part for layer in facts.layers for part in layer.working}
    positions = 4 * facts.rotary_dim * (max_model_len + budget)
    logits = 4 * samples * facts.vocab_size * 4
    caches = [cache for cache in facts.caches if isinstance(cache, KVSpec)]
    if native:  # a recorded pass uses memory again for results of the same size only
        widest = max(facts.hidden_size, *(part.widest for part in parts))
        row = (4 * facts.hidden_size + sum(part.native for part in parts)) * size + 4 * widest
        activations = (budget + samples) * row
        head_dim = max((cache.head_dim for cache in caches), default=0)
        tiles = cores * (2**18 + (max_model_len // 512 + 4) * 16 * (head_dim + 4) * 4)
        return activations + positions + logits + tiles
    most = max(sum(part.reference for part in layer.working) for layer in facts.layers)
    activations = budget * (4 * facts.hidden_size + most) * size
    gathered = 2 * max_model_len * max((cache.num_heads * cache.head_dim for cache in caches), default=0) * size * 2
    scores = budget * min(max_model_len, 8192) * 4
    return activations + positions + logits + gathered + scores


def parse_bytes(text: str | int) -> int:
    """A number of bytes: 8589934592, "8GiB", "512MiB", "64KiB".

    Raises:
        ConfigError: it is none of these.
    """
    units = {"kib": 2**10, "mib": MIB, "gib": GIB, "b": 1, "": 1}
    lowered = str(text).strip().lower()
    digits = lowered.rstrip("bgikm")
    try:
        count = int(float(digits) * units[lowered[len(digits) :].strip()])
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is not a number of bytes; write 8589934592, 8GiB or 512MiB") from None
    if count <= 0:
        raise ConfigError(f"{text!r}: the number of bytes must be positive")
    return count


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
