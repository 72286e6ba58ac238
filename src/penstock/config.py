"""Every option of the engine; `settings.resolve` settles those that the user left open.

    options (keywords of `LLM`, flags of the CLI) ──EngineConfig.from_options──> EngineConfig ("auto" allowed)

The dataclasses are the documentation: the CLI's flags, with their help, are derived from their fields.
"""

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, cast

from penstock.errors import ConfigError
from penstock.model_facts import BYTES_OF
from penstock.ranks import Meeting
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
    """Limits of a step, and the order of the queue."""

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
"""Role of an engine: prefill only (it hands the blocks on), decode only, or both."""
KVTransfer = Literal["file", "nixl"]
"""Transport of a prefill engine's blocks to the others."""


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
        "bytes for adapters; the least recently used make room for others; auto: as much as those "
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
    kv_transfer: KVTransfer = "file"
    meeting: Meeting | None = None
    """Of ranks on several nodes."""

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
