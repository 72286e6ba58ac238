"""Every option of the engine, and the one function that settles what the user left open.

    options (keywords of `LLM`, flags of the CLI) ──EngineConfig.from_options──> EngineConfig ("auto" allowed)
    EngineConfig + ModelFacts + Machine ──resolve──> Settings (nothing left open) with its MemoryPlan

The dataclasses are the documentation: the CLI's flags, with their help, are derived from their fields.
"""

import difflib
import os
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, cast

from penstock.errors import ConfigError
from penstock.memory import (
    BYTES_OF,
    DType,
    KVDType,
    Machine,
    MemoryPlan,
    ModelFacts,
    ModelPrecision,
    parse_bytes,
    plan_encoder_memory,
    plan_memory,
)
from penstock.recipes import RECIPES


def option(default: Any, help: str, choices: tuple[str, ...] = (), *, repeated: bool = False) -> Any:
    """A dataclass field that is also a keyword of `LLM` and a flag of the CLI.

    `repeated`: the flag may come several times; its values are then joined by commas.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "repeated": repeated})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it computes."""

    model: str | None = option(
        None,
        "a Hugging Face folder, a GGUF file, or the hub id of either (REPOSITORY:Q4_K_M names one of several GGUF "
        "files); without it, the built-in demo model",
    )
    task: str = option(
        "auto",
        "what the model is for: generate text, embed texts, or score a query and a document (as Qwen3-Reranker does); "
        "auto: what its folder and its architecture say",
        ("auto", "generate", "embed", "score"),
    )
    dtype: str = option("auto", "of weights and arithmetic; auto: the checkpoint's", ("auto", *BYTES_OF))
    device: str = option("auto", "cpu, cuda or cuda:N; auto: cuda where there is one")
    quantization: str | None = option(
        None, "round the weights to int8 or int4 as they are loaded; none: as the checkpoint has them", tuple(RECIPES)
    )
    packed_cache: str = option(
        "auto",
        "folder where packed weights are kept, for later starts to map; auto: penstock/packed in the user's cache "
        "folder (~/.cache); off: nowhere",
    )
    max_model_len: int | None = option(None, "longest prompt and answer together, in tokens; default: the model's")
    seed: int | None = option(None, "makes requests that bring no seed of their own reproducible, in their order")
    threads: int | None = option(None, "CPU threads of the engine; default: one a physical core")
    tensor_parallel_size: int = option(
        1,
        "processes that divide the model among them, each with its rows of every matrix: one a GPU, or on the CPU with "
        "its part of the threads; answers are the same, bit for bit",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, "tokens a KV block holds; default: 32 on the CPU, 16 on a GPU")
    kv_cache_memory: str | int = option(
        "auto", "bytes for the KV cache, a draft model's included (8589934592, 8GiB, 512MiB), or auto"
    )
    max_memory: str | int | None = option(
        None,
        "bytes of memory that weights, KV cache and workspace are planned within; default: what is free, which the "
        "engines of a server share",
    )
    kv_cache_dtype: str = option(
        "auto",
        "of cached keys and values; auto: that of the model, float16 for quantized GGUF files; int8: half of bfloat16, "
        "with a scale a token and head, to which queries are rounded as well",
        ("auto", *BYTES_OF, "int8"),
    )
    enable_prefix_caching: bool = option(True, "share the computed blocks of equal prompt beginnings")
    kv_disk: str | None = option(
        None,
        "PATH or PATH:SIZE (cache.kv:20GiB; default size: 10GiB) of a file that computed blocks are kept in and read "
        "from, also by the next start; an engine each has its own: PATH, PATH.1, ...",
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a step may hold, and who comes first."""

    max_num_seqs: int | None = option(
        None,
        "sequences that run together; default: 64 on the CPU, 256 on a GPU, or fewer whose states (of recurrent "
        "layers) fit half of the KV cache",
    )
    max_num_batched_tokens: int | None = option(
        None, "tokens that one step computes; default: 512 on the CPU, 8192 on a GPU"
    )
    policy: str = option(
        "fair",
        "order of the queue: fair shares tokens between API keys, and goes by priority and arrival within one; fcfs is "
        "first come, first served; priority is by priority alone",
        ("fair", "fcfs", "priority"),
    )
    max_batch_prefill_tokens: int | None = option(None, "TGI: prompt tokens that one step computes")
    max_batch_total_tokens: int | None = option(
        None, "TGI: prompt tokens and max_tokens, added up over all running sequences"
    )
    waiting_served_ratio: float | None = option(
        None, "TGI: while a batch runs, admit only when so many can join, as a share of the running"
    )
    max_waiting_tokens: int | None = option(
        None, "TGI: after this many steps without an admission, admit whatever the ratio; default: 20"
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Guessing tokens ahead, to compute several in one step. Answers stay the same, bit for bit."""

    speculation: str | None = option(
        None,
        "guess the next tokens, as many as pay: ngram looks them up in the text so far, draft asks a small model, mtp "
        "the model's own head for it (multi-token prediction)",
        ("ngram", "draft", "mtp"),
    )
    speculative_model: str | None = option(
        None, "the draft model, given as model is, of the same vocabulary; implies speculation draft"
    )
    num_speculative_tokens: int | None = option(
        None, "most tokens that are guessed for a sequence in one step; default: 16, with mtp 3"
    )


Role = Literal["any", "prefill", "decode"]
"""What an engine does: prefill only (it hands the blocks on), decode only, or any of the two."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Low-rank adapters (LoRA), which requests choose by name."""

    adapter: str | None = option(
        None,
        "name=PATH of an adapter that PEFT saved, a folder or a hub id, which requests choose as their model; several "
        "by several flags, or separated by commas",
        repeated=True,
    )
    adapter_memory: str | int = option(
        "auto",
        "bytes for adapters, of which those that were not used for longest give way to others; auto: as much as those "
        "of --adapter take, so that none can be loaded later where there are none",
    )

    @property
    def paths(self) -> dict[str, str]:
        """Where each adapter is, by name.

        Raises:
            ConfigError: an entry is not name=PATH, or a name comes twice.
        """
        found: dict[str, str] = {}
        for entry in (self.adapter or "").split(",") if self.adapter else ():
            name, equals, path = (part.strip() for part in entry.partition("="))
            if not (name and equals and path):
                raise ConfigError(f"adapter takes name=PATH, not {entry!r}")
            if name in found:
                raise ConfigError(f"adapter names {name!r} twice")
            found[name] = path
        return found


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine, as the user gave them, and its role among others."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    role: Role = "any"

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """The configuration that flat options describe; text values are parsed as on the command line.

        Raises:
            ConfigError: an option is unknown (the nearest known one is named), or a value is none it takes.
        """
        known = {f.name: (section, f) for section, f in iter_options()}
        parsed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{_nearest(name, known)}")
            section, f = known[name]
            parsed.setdefault(section, {})[name] = parse_value(f, value)
        return cls(
            model=ModelConfig(**parsed.get("model", {})),
            cache=CacheConfig(**parsed.get("cache", {})),
            scheduler=SchedulerConfig(**parsed.get("scheduler", {})),
            speculation=SpeculationConfig(**parsed.get("speculation", {})),
            adapters=AdapterConfig(**parsed.get("adapters", {})),
        )

    def options(self) -> dict[str, Any]:
        """Every option's value, flat."""
        return {f.name: getattr(getattr(self, section), f.name) for section, f in iter_options()}


_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculation": SpeculationConfig,
    "adapters": AdapterConfig,
}


def iter_options() -> "Iterator[tuple[str, Field[Any]]]":
    """Each engine option, as (section of `EngineConfig`, dataclass field)."""
    for section, cls in _SECTIONS.items():
        for f in fields(cls):
            yield section, f


def _nearest(name: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def parse_value(f: "Field[Any]", value: Any) -> Any:
    """`value` as the option's type: text is parsed, anything else is checked.

    Raises:
        ConfigError: the option does not take this value.
    """
    kinds = _types_of(f)
    choices = f.metadata.get("choices", ())
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in kinds:
            return None
        raise ConfigError(f"{f.name} cannot be none")
    parsed = _convert(value, kinds)
    if parsed is None:
        names = " or ".join(k.__name__ for k in kinds if k is not type(None))
        raise ConfigError(f"{f.name} must be {names}, not {value!r}")
    if choices and parsed not in choices:
        raise ConfigError(f"{f.name} must be one of {', '.join(choices)}; not {parsed!r}")
    return parsed


def _types_of(f: "Field[Any]") -> tuple[type, ...]:
    if isinstance(f.type, types.UnionType):
        return typing.get_args(f.type)
    return (cast(type, f.type),)


def _convert(value: Any, kinds: tuple[type, ...]) -> Any:
    """The value in the first of the kinds that takes it, or None."""
    if bool in kinds:
        flags = {"true": True, "1": True, "false": False, "0": False}
        return value if isinstance(value, bool) else flags.get(str(value).lower())
    if isinstance(value, bool):
        return None
    for number in (int, float):
        if number in kinds and isinstance(value, (int, float, str)):
            try:
                converted = number(value)
            except ValueError:
                continue
            if converted == value or isinstance(value, str):
                return converted
    return value if str in kinds and isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class TgiControls:
    """TGI's batching controls, where any of them is set; `core.policies.TgiAdmission` says what they do."""

    max_batch_prefill_tokens: int | None
    max_batch_total_tokens: int | None
    waiting_served_ratio: float
    max_waiting_tokens: int


@dataclass(frozen=True, slots=True)
class Speculative:
    """How tokens are guessed."""

    num_tokens: int
    """At most, for a sequence in one step."""
    draft: "Settings | None"
    """The draft model's own; None where they are looked up in the text."""
    mtp: bool = False
    """The draft model is a head of the model itself."""


@dataclass(frozen=True, slots=True)
class BlockFileSettings:
    """The file that an engine keeps computed blocks in."""

    path: str | None
    """None: a temporary one, for other engines to read."""
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration with nothing left open."""

    model_name: str
    dtype: DType
    kv_cache_dtype: KVDType
    quantization: str | None
    """The recipe that matrices are rounded by as they are loaded; None: they stay as stored."""
    packed_cache: str | None
    """Folder where packed weights are kept; None: nowhere."""
    device: str
    """Of several ranks on GPUs, the first one's."""
    threads: int
    """Of each rank."""
    seed: int | None
    max_model_len: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    admission: TgiControls | None
    speculation: Speculative | None
    memory: MemoryPlan
    """Of each rank."""
    role: Role = "any"
    block_file: BlockFileSettings | None = None
    tensor_parallel_size: int = 1


def resolve(
    config: EngineConfig,
    facts: ModelFacts,
    machine: Machine,
    draft_facts: ModelFacts | None = None,
    adapter_elements: int = 0,
) -> Settings:
    """Settle every open option. Pure: the same arguments give the same settings.

    Args:
        facts: of the model as one rank has it, where there are several.
        draft_facts: of the draft model, if one is asked for.
        adapter_elements: of the weights of all adapters that are listed.

    Raises:
        ConfigError: the options contradict each other, a model or the machine.
    """
    on_cpu = machine.device == "cpu"
    ranks = _positive("tensor_parallel_size", config.model.tensor_parallel_size, 1)
    if config.cache.max_memory is not None:
        machine = replace(machine, memory=min(machine.memory, parse_bytes(config.cache.max_memory)))
    if facts.is_encoder:
        return _resolve_encoder(config, facts, machine)
    if ranks > 1:
        _refuse_with_ranks(config)
    threads = _positive("threads", config.model.threads, machine.cores)
    if on_cpu:
        machine = replace(machine, memory=machine.memory // ranks, cores=max(1, machine.cores // ranks))
    model, cache, scheduler = config.model, config.cache, config.scheduler
    target = _arithmetic(facts, config, model.quantization)
    mtp = config.speculation.speculation == "mtp"
    draft = None if draft_facts is None else _arithmetic(draft_facts, config, model.quantization if mtp else None)
    if mtp:
        target = replace(target, keeps_hidden=True)
    max_model_len = _max_model_len(model.max_model_len, facts)
    max_num_seqs, budget = _step_limits(scheduler, on_cpu)
    if config.speculation.speculation or config.speculation.speculative_model:
        _refuse_states(facts, draft_facts)
    if mtp and config.speculation.speculative_model is not None:
        raise ConfigError("speculation mtp asks the model's own head and takes no speculative_model; leave one out")
    if mtp and draft_facts is None:
        raise ConfigError(f"{facts.name} has no head that guesses further tokens: leave speculation mtp out")
    num_drafts = _num_drafts(config.speculation, draft_facts)
    wanted = config.adapters.adapter_memory
    adapters = adapter_elements * BYTES_OF[target.dtype] if wanted == "auto" else parse_bytes(wanted)

    def plan(max_num_seqs: int) -> MemoryPlan:
        return plan_memory(
            _of_rank(cache.kv_cache_memory, ranks),
            _positive("block_size", cache.block_size, 32 if on_cpu else 16),
            machine,
            [target] if draft is None else [target, draft],
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            budget=budget,
            num_drafts=num_drafts,
            adapters=adapters,
        )

    if facts.state_bytes and scheduler.max_num_seqs is None:
        max_num_seqs = _sequences_for_states(max_num_seqs, facts, plan)
    memory = plan(max_num_seqs)
    if memory.num_tokens < max_model_len:
        if model.max_model_len is not None:
            raise ConfigError(
                f"a request of max_model_len ({max_model_len}) tokens does not fit the KV cache, which holds "
                f"{memory.num_tokens}; lower max_model_len or raise kv_cache_memory"
            )
        max_model_len = memory.num_tokens
    settings = Settings(
        model_name=facts.name,
        dtype=target.dtype,
        kv_cache_dtype=target.kv_dtype,
        quantization=target.quantization,
        packed_cache=_packed_cache(model.packed_cache),
        device=machine.device,
        threads=max(1, threads // ranks),
        tensor_parallel_size=ranks,
        seed=model.seed,
        max_model_len=max_model_len,
        enable_prefix_caching=cache.enable_prefix_caching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=scheduler.policy,
        admission=_tgi_controls(scheduler, max_model_len),
        speculation=Speculative(num_drafts, None) if num_drafts else None,
        memory=memory,
        role=config.role,
        block_file=_block_file(config, memory, facts.name),
    )
    if draft is None or memory.draft is None:
        return settings
    return replace(settings, speculation=Speculative(num_drafts, _draft_settings(settings, draft, memory.draft), mtp))


_OF_GENERATING = (
    *("kv_cache_memory", "kv_cache_dtype", "enable_prefix_caching", "kv_disk"),
    *("max_batch_prefill_tokens", "max_batch_total_tokens", "waiting_served_ratio", "max_waiting_tokens"),
    *("speculation", "speculative_model", "num_speculative_tokens", "tensor_parallel_size"),
)
"""Options that mean nothing to a model that embeds or scores."""
_ENCODER_BLOCK = 32
_ENCODER_SEQUENCES = 1024


def _resolve_encoder(config: EngineConfig, facts: ModelFacts, machine: Machine) -> Settings:
    """The settings of a model that embeds or scores: a step has whole texts, and nothing outlives it."""
    unset, given = EngineConfig().options(), config.options()
    for name in _OF_GENERATING:
        if given[name] != unset[name]:
            raise ConfigError(f"{name} is for models that generate; {facts.name} embeds or scores: leave it out")
    if config.role != "any":
        raise ConfigError(f"prefill_engines are for models that generate; {facts.name} embeds or scores: leave it out")
    model, scheduler = config.model, config.scheduler
    precision = _arithmetic(facts, config, model.quantization)
    block_size = _positive("block_size", config.cache.block_size, _ENCODER_BLOCK)
    max_model_len = _max_model_len(model.max_model_len, facts)
    budget = _positive("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1024)
    return Settings(
        model_name=facts.name,
        dtype=precision.dtype,
        kv_cache_dtype=precision.dtype,
        quantization=precision.quantization,
        packed_cache=_packed_cache(model.packed_cache),
        device=machine.device,
        threads=_positive("threads", model.threads, machine.cores),
        seed=model.seed,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
        max_num_seqs=_positive("max_num_seqs", scheduler.max_num_seqs, _ENCODER_SEQUENCES),
        max_num_batched_tokens=budget,
        policy=scheduler.policy,
        admission=None,
        speculation=None,
        memory=plan_encoder_memory(
            block_size,
            machine,
            replace(precision, kv_dtype=precision.dtype),
            max_model_len=max_model_len,
            budget=budget,
        ),
    )


def _arithmetic(facts: ModelFacts, config: EngineConfig, quantization: str | None) -> ModelPrecision:
    if quantization is not None and facts.stored_format is not None:
        raise ConfigError(
            f"quantization={quantization} rounds the weights of a checkpoint in floating point; this one is quantized "
            f"already ({facts.stored_format}): leave the option out"
        )
    dtype = facts.dtype if config.model.dtype == "auto" else cast(DType, config.model.dtype)
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        wanted = facts.kv_dtype or dtype
    return ModelPrecision(facts, dtype, cast(KVDType, wanted), quantization)


def _refuse_with_ranks(config: EngineConfig) -> None:
    """Refuse what concerns a single process's blocks, hidden states or weights."""
    refused = {
        "speculation mtp": config.speculation.speculation == "mtp",
        "kv_disk": config.cache.kv_disk is not None,
        "adapter": config.adapters.adapter is not None,
        "adapter_memory": config.adapters.adapter_memory != AdapterConfig().adapter_memory,
        "prefill_engines": config.role != "any",
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"{name} does not go with tensor_parallel_size above 1; leave one out")


def _of_rank(memory: str | int, ranks: int) -> str | int:
    return memory if memory == "auto" or ranks == 1 else parse_bytes(memory) // ranks


def _packed_cache(wanted: str) -> str | None:
    if wanted == "off":
        return None
    if wanted == "auto":
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "penstock", "packed")
    return os.path.abspath(os.path.expanduser(wanted))


def _refuse_states(facts: ModelFacts, draft_facts: ModelFacts | None) -> None:
    for one in (facts, draft_facts):
        if one is not None and one.state_bytes:
            raise ConfigError(
                f"speculation takes back what was guessed wrong, and the recurrent layers of {one.name} keep states, "
                "from which no token can be taken back: leave speculation out"
            )


def _sequences_for_states(most: int, facts: ModelFacts, plan: Callable[[int], MemoryPlan]) -> int:
    """How many sequences run together unless the user says: so many that their states take half of the cache."""
    while most > 1:
        try:
            memory = plan(most)
        except ConfigError:  # not even a block of keys is left
            most //= 2
            continue
        if 2 * most * facts.state_bytes <= memory.kv_cache:
            break
        most //= 2
    return most


def _num_drafts(options: SpeculationConfig, draft_facts: ModelFacts | None) -> int:
    """Most tokens that are guessed for a sequence; 0 without speculation."""
    kind, model, number = options.speculation, options.speculative_model, options.num_speculative_tokens
    if kind == "ngram" and model is not None:
        raise ConfigError("speculation ngram looks tokens up and takes no speculative_model; leave one of the two out")
    if kind == "draft" and model is None:
        raise ConfigError("speculation draft needs a model that guesses: give it as speculative_model")
    if kind is None and model is None:
        if number is not None:
            raise ConfigError("num_speculative_tokens does nothing without speculation: set that, too")
        return 0
    assert (model is None and kind != "mtp") == (draft_facts is None)
    return _positive("num_speculative_tokens", number, 3 if kind == "mtp" else 16)


def _draft_settings(target: Settings, draft: ModelPrecision, memory: MemoryPlan) -> Settings:
    """The draft model works as its target does, on the same texts."""
    if draft.facts.max_position < target.max_model_len:
        raise ConfigError(
            f"the draft model {draft.facts.name} takes texts of up to {draft.facts.max_position} tokens; "
            f"set max_model_len, which is {target.max_model_len}, to no more than that"
        )
    return replace(
        target,
        model_name=draft.facts.name,
        tensor_parallel_size=1,  # the first rank guesses alone
        dtype=draft.dtype,
        kv_cache_dtype=draft.kv_dtype,
        quantization=draft.quantization,
        memory=memory,
        role="any",
        block_file=None,
    )


DEFAULT_BLOCK_FILE = 10 * 2**30
EXPORTED_BYTES = 4 * 2**30
"""Of the temporary file from which others read what a prefill engine computed."""


def _block_file(config: EngineConfig, memory: MemoryPlan, model: str) -> BlockFileSettings | None:
    """The file of an engine that keeps blocks, or hands them on."""
    wanted, role = config.cache.kv_disk, config.role
    if wanted is None and role == "any":
        return None
    what = "kv_disk keeps" if wanted is not None else "a prefill engine hands on"
    if not config.cache.enable_prefix_caching:
        raise ConfigError(f"{what} blocks of the prefix cache: leave enable_prefix_caching on")
    if memory.groups[0].window is not None or any(group.checkpoint_every is not None for group in memory.groups):
        raise ConfigError(
            f"{what} blocks of models of which some layers keep all keys, and none a state; {model} has sliding "
            "windows only, or recurrent layers: leave the option out"
        )
    if wanted is None:
        return BlockFileSettings(None, EXPORTED_BYTES) if role == "prefill" else None
    path, size = wanted, DEFAULT_BLOCK_FILE
    head, colon, tail = wanted.rpartition(":")
    if colon and os.sep not in tail:
        path, size = head, parse_bytes(tail)
    if not path:
        raise ConfigError(f"kv_disk {wanted!r} names no file: write PATH or PATH:SIZE")
    return BlockFileSettings(os.path.abspath(os.path.expanduser(path)), size)


def _positive(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
    return default if value is None else value


def _step_limits(scheduler: SchedulerConfig, on_cpu: bool) -> tuple[int, int]:
    """Most sequences and most tokens of a step."""
    sequences = _positive("max_num_seqs", scheduler.max_num_seqs, 64 if on_cpu else 256)
    tokens = scheduler.max_num_batched_tokens
    tokens = _positive("max_num_batched_tokens", tokens, max(512 if on_cpu else 8192, sequences))
    if tokens < sequences:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({sequences}): a step could not give "
            "each running sequence its token; raise the first or lower the second"
        )
    return sequences, tokens


def _max_model_len(wanted: int | None, facts: ModelFacts) -> int:
    if wanted is None:
        return facts.max_position
    if not 1 <= wanted <= facts.max_position:
        raise ConfigError(f"max_model_len must be from 1 to {facts.max_position}, the model's own; not {wanted}")
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
