"""Resolves the options that the user left open to settings.

EngineConfig + ModelFacts + Machine ──resolve──> Settings (nothing left open) with its MemoryPlan
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.api.request import MediaKind
from penstock.config.block_file import BlockFileSettings, block_file
from penstock.config.byte_counts import parse_bytes
from penstock.config.engine_config import (
    AdapterConfig,
    EngineConfig,
    KVTransfer,
    Role,
    SchedulerConfig,
    SpeculationConfig,
)
from penstock.config.footprint import PoolLimits, widen_weights
from penstock.config.image_settings import ImageSettings, check_image_limits, image_settings
from penstock.config.machine import Machine
from penstock.config.memory import MemoryPlan, most_branches, plan_encoder_memory, plan_memory
from penstock.config.model_facts import BYTES_OF, DType, KVDType, KVSpec, ModelFacts, ModelPrecision, TowerFacts
from penstock.config.precision import model_precisions, precision_of, widened
from penstock.config.ranks import Rendezvous
from penstock.dataclass import dataclass
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TgiControls:
    """TGI's batching controls, if any is set; see `core.policies.TgiAdmission`."""

    max_batch_prefill_tokens: int | None
    max_batch_total_tokens: int | None
    waiting_served_ratio: float
    max_waiting_tokens: int


@dataclass(frozen=True, slots=True)
class Speculative:
    """Settings of speculative decoding."""

    num_tokens: int
    """Maximum draft tokens of a sequence in one step."""
    draft: "Settings | None"
    """Settings of the draft model; None: drafts are looked up in the text."""
    mtp: bool = False
    """Whether the draft model is a head of the model itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved configuration of an engine."""

    model_name: str
    dtype: DType
    kv_cache_dtype: KVDType
    quantization: str | None
    """Recipe that quantizes matrices on loading; None: they stay as stored."""
    packed_cache: str | None
    """Folder of the packed weight cache; None: no cache."""
    device: str
    """Device; with several ranks on GPUs, the first rank's."""
    threads: int
    """Threads per rank."""
    seed: int | None
    max_model_len: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    admission: TgiControls | None
    speculation: Speculative | None
    memory: MemoryPlan
    """Memory plan of each rank."""
    role: Role = "any"
    kv_transfer: KVTransfer = "file"
    block_file: BlockFileSettings | None = None
    tensor_parallel_size: int = 1
    rendezvous: Rendezvous | None = None
    """Rendezvous of ranks on several nodes; None: all ranks are on this machine."""
    float16_weights: bool = False
    """Whether floating-point matrices are float16, though `dtype` is float32."""
    widened_weights: bool = False
    """Whether the reference kernels keep quantized and float16 matrices in float32."""
    gap: str = ""
    """An operation of the model that the native kernels lack, so that the reference computes; empty: none."""
    images: ImageSettings | None = None
    """None: the model takes text only."""
    backend: str = "penstock"
    """What computes the model: `penstock` or `transformers`."""

    @property
    def towers(self) -> Mapping[MediaKind, TowerFacts]:
        """Facts of the encoder of each kind of media that the model takes; empty: it takes text only."""
        return {} if self.images is None else self.images.towers

    @property
    def moves_blocks(self) -> bool:
        """Whether KV blocks are transferred to or from files or other engines."""
        return self.block_file is not None or self.role != "any"

    @property
    def overflow_advice(self) -> str:
        """Advice to append to errors about non-finite results; empty if there is none."""
        narrow = {"--dtype": self.dtype == "float16" or self.float16_weights}
        narrow |= {"--kv-cache-dtype": self.kv_cache_dtype == "float16"}
        for name, is_narrow in narrow.items():
            if is_narrow:
                return f"; they may have exceeded the range of float16: start with {name} bfloat16 or float32"
        return ""


_CPU_BLOCK = 32
"""Tokens of a block on a CPU."""


def resolve(
    config: EngineConfig,
    facts: ModelFacts,
    machine: Machine,
    draft_facts: ModelFacts | None = None,
    adapter_elements: int = 0,
) -> Settings:
    """Resolve every open option. Pure: the same arguments give the same settings.

    Args:
        facts: facts of the model; with several ranks, of one rank's shard.
        draft_facts: facts of the draft model, if there is one.
        adapter_elements: total weight elements of the listed adapters.

    Raises:
        ConfigError: the options contradict each other, a model or the machine.
    """
    if config.cache.max_memory is not None:
        most = parse_bytes(config.cache.max_memory)
        # Before all else, so that every part of the plan sees the limit as the machine's size.
        machine = replace(machine, memory=min(machine.memory, most), is_limited=most < machine.memory)
    machine = _for_kernels(machine, [facts] if draft_facts is None else [facts, draft_facts], config)
    if facts.is_encoder:
        return _resolve_encoder(config, facts, machine)
    model, cache, scheduler = config.model, config.cache, config.scheduler
    ranks = _ranks(config)
    threads = _threads(config, machine)
    target, *drafts = models = widened(config, machine, model_precisions(config, machine, facts, draft_facts))
    num_drafts = _num_drafts(config.speculation, facts, draft_facts)
    memory, limits = _plan(config, machine, models, num_drafts, adapter_elements, threads)
    settings = Settings(
        model_name=facts.name,
        dtype=target.dtype,
        float16_weights=target.float16_weights,
        widened_weights=target.widened_weights,
        gap=machine.gap,
        kv_cache_dtype=target.kv_dtype,
        quantization=target.quantization,
        packed_cache=packed_cache_folder(model.packed_cache),
        device=machine.device,
        threads=max(1, threads // ranks),
        tensor_parallel_size=ranks,
        rendezvous=config.rendezvous,
        seed=model.seed,
        max_model_len=limits.max_model_len,
        enable_prefix_caching=cache.enable_prefix_caching,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.budget,
        policy=scheduler.policy,
        admission=_tgi_controls(scheduler, limits.max_model_len),
        speculation=Speculative(num_drafts, None) if num_drafts else None,
        memory=memory,
        role=config.role,
        kv_transfer=config.kv_transfer,
        block_file=block_file(config, memory, facts.name),
        images=image_settings(target, memory.image_features),
        backend=model.backend,
    )
    for tower in target.facts.towers.values():
        check_image_limits(tower, limits.max_num_seqs, limits.budget, scheduler.max_batch_prefill_tokens)
    if not drafts or memory.draft is None:
        return settings
    mtp = config.speculation.speculation == "mtp"
    draft = _draft_settings(settings, drafts[0], memory.draft, ranks if mtp else 1)
    return replace(settings, speculation=Speculative(num_drafts, draft, mtp))


def _for_kernels(machine: Machine, models: Sequence[ModelFacts], config: EngineConfig) -> Machine:
    """The machine, without native kernels if their caches do not support the models' heads or the size of a block."""
    if not machine.native or machine.device != "cpu":
        return machine
    block_size = _positive("block_size", config.cache.block_size, _CPU_BLOCK)
    caches = (cache for facts in models for cache in facts.caches if isinstance(cache, KVSpec))
    gap = next(filter(None, (cache.gap(block_size) for cache in caches)), "")
    return machine.without_native_kernels(gap) if gap else machine


def _plan(
    config: EngineConfig,
    machine: Machine,
    models: list[ModelPrecision],
    num_drafts: int,
    adapter_elements: int,
    threads: int,
) -> tuple[MemoryPlan, PoolLimits]:
    """The memory plan of one rank, and the limits for which it was made.

    Unless the user sets them, `max_num_seqs` is reduced until states take half of the cache, and `max_model_len` to the
    capacity of the cache.
    """
    target, cache, ranks = models[0], config.cache, config.model.tensor_parallel_size
    on_cpu = machine.device == "cpu"
    if on_cpu:
        # Ranks on CPUs share one machine; each GPU has its own memory.
        machine = replace(machine, memory=machine.memory // ranks, cores=max(1, machine.cores // ranks))
    wanted = config.adapters.adapter_memory
    adapters = adapter_elements * BYTES_OF[target.dtype] if wanted == "auto" else parse_bytes(wanted)
    limits = _limits(config, target.facts, threads if on_cpu else None)
    kv_cache_memory = _of_rank(cache.kv_cache_memory, ranks)
    plan = partial(plan_memory, kv_cache_memory, machine, models, num_drafts=num_drafts, adapters=adapters)
    if target.facts.state_bytes and config.scheduler.max_num_seqs is None:
        limits = _limits_for_states(limits, target.facts, num_drafts, plan)
    memory = plan(limits)
    # A request of maximum length must fit alone: preemption of all others could not help it otherwise.
    if memory.num_tokens >= limits.max_model_len:
        return memory, limits
    # What the user asked for is refused rather than lowered; the checkpoint's own context is lowered.
    if config.model.max_model_len is not None:
        larger = "max_memory" if machine.is_limited and cache.kv_cache_memory == "auto" else "kv_cache_memory"
        raise ConfigError(
            f"a request of max_model_len ({limits.max_model_len}) tokens does not fit the KV cache, which holds "
            f"{memory.num_tokens}; lower max_model_len or raise {larger}"
        )
    return memory, replace(limits, max_model_len=memory.num_tokens)


_OF_GENERATING = (
    *("kv_cache_memory", "kv_cache_dtype", "enable_prefix_caching", "kv_disk"),
    *("max_batch_prefill_tokens", "max_batch_total_tokens", "waiting_served_ratio", "max_waiting_tokens"),
    *("speculation", "speculative_model", "num_speculative_tokens", "tensor_parallel_size"),
)
"""Options that do not apply to an encoder."""
_ENCODER_SEQUENCES = 1024
_ENCODER_TOKENS = 1024


def _resolve_encoder(config: EngineConfig, facts: ModelFacts, machine: Machine) -> Settings:
    """The settings of an encoder: each step computes whole texts, and nothing is cached between steps."""
    unset, given = EngineConfig().options(), config.options()
    for name in _OF_GENERATING:
        if given[name] != unset[name]:
            raise ConfigError(f"{name} is for models that generate; {facts.name} embeds or scores: leave it out")
    if config.role != "any":
        raise ConfigError(f"prefill_engines are for models that generate; {facts.name} embeds or scores: leave it out")
    model, scheduler = config.model, config.scheduler
    precision = precision_of(facts, config, machine, model.quantization)
    (precision,) = widen_weights([replace(precision, kv_dtype=precision.dtype)], machine)
    limits = PoolLimits(
        _max_model_len(model.max_model_len, facts),
        _positive("max_num_seqs", scheduler.max_num_seqs, _ENCODER_SEQUENCES),
        _positive("max_num_batched_tokens", scheduler.max_num_batched_tokens, _ENCODER_TOKENS),
        _positive("block_size", config.cache.block_size, _CPU_BLOCK),
    )
    return Settings(
        model_name=facts.name,
        dtype=precision.dtype,
        float16_weights=precision.float16_weights,
        widened_weights=precision.widened_weights,
        gap=machine.gap,
        kv_cache_dtype=precision.kv_dtype,
        quantization=precision.quantization,
        packed_cache=packed_cache_folder(model.packed_cache),
        device=machine.device,
        threads=_threads(config, machine),
        seed=model.seed,
        max_model_len=limits.max_model_len,
        enable_prefix_caching=False,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.budget,
        policy=scheduler.policy,
        admission=None,
        speculation=None,
        memory=plan_encoder_memory(machine, precision, limits),
    )


def _ranks(config: EngineConfig) -> int:
    """The number of processes that divide the model.

    Raises:
        ConfigError: there are several, and an option requires the blocks of a single process, or files of one machine.
    """
    ranks = _positive("tensor_parallel_size", config.model.tensor_parallel_size, 1)
    if config.rendezvous is not None and config.role != "any":
        raise ConfigError("prefill_engines do not work with nodes_per_engine: leave one of them out")
    if config.rendezvous is not None and config.adapters != AdapterConfig():
        raise ConfigError(
            "adapters do not work with nodes_per_engine: leave adapter and adapter_memory, or nodes_per_engine out"
        )
    if config.rendezvous is not None and config.cache.kv_disk is not None:
        raise ConfigError("kv_disk does not work with nodes_per_engine: leave one of them out")
    return ranks


def _of_rank(memory: str | int, ranks: int) -> str | int:
    return memory if memory == "auto" or ranks == 1 else parse_bytes(memory) // ranks


def packed_cache_folder(wanted: str) -> str | None:
    """The folder of the option `packed_cache`; None: no cache.

    Raises:
        ConfigError: the value cannot be a folder's name.
    """
    if wanted == "off":
        return None
    if wanted == "auto":
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "penstock", "packed")
    folder = os.path.expanduser(wanted)
    if not folder or folder.startswith("~"):
        raise ConfigError(f"packed_cache is auto, off or a folder, not {wanted!r}")
    return os.path.abspath(folder)


def _limits_for_states(
    limits: PoolLimits, facts: ModelFacts, num_drafts: int, plan: Callable[[PoolLimits], MemoryPlan]
) -> PoolLimits:
    """The limits, with `max_num_seqs` reduced until all states, including those for drafts, fit half of the cache."""
    while limits.max_num_seqs > 1:
        num_states = limits.max_num_seqs + most_branches(limits.max_num_seqs, num_drafts)
        try:
            if 2 * num_states * facts.state_bytes <= plan(limits).kv_cache:
                break
        except ConfigError:  # not even a block of keys is left
            pass
        limits = replace(limits, max_num_seqs=limits.max_num_seqs // 2)
    return limits


def _num_drafts(options: SpeculationConfig, facts: ModelFacts, draft_facts: ModelFacts | None) -> int:
    """Maximum draft tokens of a sequence in one step; 0 without speculation."""
    kind, model, number = options.speculation, options.speculative_model, options.num_speculative_tokens
    if kind is None and model is None:
        if number is not None:
            raise ConfigError("num_speculative_tokens has no effect without speculation: set that, too")
        return 0
    if kind in ("ngram", "mtp") and model is not None:
        does = "looks tokens up" if kind == "ngram" else "asks the model's own head"
        raise ConfigError(f"speculation {kind} {does} and takes no speculative_model; leave one of the two out")
    if kind == "draft" and model is None:
        raise ConfigError("speculation draft needs a draft model: set speculative_model")
    if kind == "mtp" and draft_facts is None:
        raise ConfigError(f"{facts.name} has no multi-token prediction head: leave speculation mtp out")
    assert (model is None and kind != "mtp") == (draft_facts is None)
    if draft_facts is not None and draft_facts.state_bytes:
        raise ConfigError(
            f"the draft model {draft_facts.name} has recurrent layers, whose state cannot be reset after a rejected "
            "draft; choose a draft model with attention layers only"
        )
    return _positive("num_speculative_tokens", number, 3 if kind == "mtp" else 16)


def _draft_settings(target: Settings, draft: ModelPrecision, memory: MemoryPlan, ranks: int) -> Settings:
    """Settings of the draft model, derived from its target's; with one of several ranks, the first drafts alone."""
    if draft.facts.max_position < target.max_model_len:
        raise ConfigError(
            f"the draft model {draft.facts.name} takes texts of up to {draft.facts.max_position} tokens; "
            f"set max_model_len, which is {target.max_model_len}, to no more than that"
        )
    return replace(
        target,
        model_name=draft.facts.name,
        tensor_parallel_size=ranks,
        rendezvous=None,
        dtype=draft.dtype,
        float16_weights=draft.float16_weights,
        widened_weights=draft.widened_weights,
        kv_cache_dtype=draft.kv_dtype,
        quantization=draft.quantization,
        memory=memory,
        role="any",
        block_file=None,
        images=None,
    )


MAX_THREADS = 1024
"""Maximum of `threads`, more than any machine has cores: the process could not start many more."""


def _threads(config: EngineConfig, machine: Machine) -> int:
    threads = _positive("threads", config.model.threads, machine.cores)
    if threads > max(MAX_THREADS, machine.cores):
        raise ConfigError(
            f"threads must be at most {MAX_THREADS}, not {threads}; this machine has {machine.cores} cores"
        )
    return threads


def _positive(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
    return default if value is None else value


def _limits(config: EngineConfig, facts: ModelFacts, threads: int | None) -> PoolLimits:
    """Limits from the options: sequences and tokens of a step, the longest text, and the block size.

    Args:
        threads: threads of all ranks on the CPU; None: the model runs on a GPU.
    """
    on_cpu = threads is not None
    sequences = _positive("max_num_seqs", config.scheduler.max_num_seqs, 64 if on_cpu else 256)
    # A prompt's step, for which running answers wait, takes one thread as long as two; and its activations are smaller.
    default = max(8192 if threads is None else min(512, 256 * threads), sequences)
    for tower in facts.towers.values():
        if tower.attends_within:
            default = max(default, tower.max_tokens + sequences)
    tokens = _positive("max_num_batched_tokens", config.scheduler.max_num_batched_tokens, default)
    if tokens < sequences:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({sequences}): a step could not give "
            "each running sequence its token; raise the first or lower the second"
        )
    block_size = _positive("block_size", config.cache.block_size, _CPU_BLOCK if on_cpu else 16)
    return PoolLimits(_max_model_len(config.model.max_model_len, facts), sequences, tokens, block_size)


def _max_model_len(wanted: int | None, facts: ModelFacts) -> int:
    if wanted is None:
        return min(facts.usual_length or facts.max_position, facts.max_position)
    if not 1 <= wanted <= facts.max_position:
        raise ConfigError(f"max_model_len must be from 1 to {facts.max_position}, {facts.limit}; not {wanted}")
    return wanted


def _tgi_controls(scheduler: SchedulerConfig, max_model_len: int) -> TgiControls | None:
    prefill, total = scheduler.max_batch_prefill_tokens, scheduler.max_batch_total_tokens
    ratio, waiting = scheduler.waiting_served_ratio, scheduler.max_waiting_tokens
    if prefill is total is ratio is waiting is None:
        return None
    _positive("max_batch_prefill_tokens", prefill, 1)
    if total is not None and total < max_model_len:
        raise ConfigError(
            f"max_batch_total_tokens ({total}) is below max_model_len ({max_model_len}): the longest request could "
            "never be admitted; raise the first or lower the second"
        )
    if ratio is not None and not ratio >= 0:
        raise ConfigError(f"waiting_served_ratio must be at least 0, not {ratio}")
    # A control that is left open beside others is neutral, except that no request may wait for ever.
    return TgiControls(prefill, total, ratio or 0.0, _positive("max_waiting_tokens", waiting, 20))
