"""Every option of the engine; `settings.resolve` computes those that the user left open.

    options (keywords of `LLM`, flags of the CLI) ──EngineConfig.from_options──> EngineConfig ("auto" allowed)

The dataclasses are the documentation: the CLI's flags, with their help, are derived from their fields.
"""

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields
from typing import Any, Literal, cast

from penstock.api.sampling_params import SEED_RANGE
from penstock.config.model_facts import BYTES_OF
from penstock.config.ranks import Rendezvous
from penstock.config.recipes import RECIPES
from penstock.dataclass import dataclass
from penstock.errors import ConfigError, shown


def option(
    default: Any, help: str, choices: tuple[str, ...] = (), *, repeated: bool = False, is_json: bool = False
) -> Any:
    """A dataclass field that is also a keyword of `LLM` and a flag of the CLI.

    `repeated`: the flag may come several times; its values NAME=VALUE are then joined by commas. `is_json`: its text is
    a JSON object, for which Python may give a dictionary, and TOML a table.
    """
    metadata = {"help": help, "choices": choices, "repeated": repeated, "is_json": is_json}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, and how it is computed."""

    model: str | None = option(
        None,
        "a Hugging Face folder, a GGUF file, or the hub id of either (REPOSITORY:Q4_K_M names one of several GGUF "
        "files); without it, the built-in demo model; `penstock serve` takes several, each as NAME=MODEL",
        repeated=True,
    )
    task: str = option(
        "auto",
        "task of the model: generate text, embed texts, or score documents against a query (as Qwen3-Reranker does); "
        "auto: from its folder and architecture",
        ("auto", "generate", "embed", "score"),
    )
    revision: str | None = option(None, "branch, tag or commit of the model's hub repository; default: its main branch")
    mmproj: str | None = option(
        None,
        "vision tower or audio encoder of a GGUF model (llama.cpp's mmproj file); default: the one beside it, if any",
    )
    chat_template: str | None = option(
        None, "file with a Jinja chat template, or the template itself; default: the model's own"
    )
    hf_overrides: str | None = option(
        None,
        "JSON object of settings that replace those of the model's config.json, as "
        '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}',
        is_json=True,
    )
    dtype: str = option(
        "auto",
        "type of weights and arithmetic; auto: the checkpoint's; float16 on CPUs: of weights alone, with arithmetic in "
        "float32",
        ("auto", *BYTES_OF),
    )
    device: str = option("auto", "cpu, cuda or cuda:N, which need PyTorch; auto: cuda if available")
    quantization: str | None = option(
        None, "quantize the weights while loading; default: as stored in the checkpoint", tuple(RECIPES)
    )
    packed_cache: str = option(
        "auto",
        "folder that caches packed weights, which later starts map; auto: penstock/packed in the user's cache folder "
        "(~/.cache), of up to a quarter of the free disk space and 64 GiB; off: no cache; `penstock cache` lists and "
        "empties it",
    )
    max_model_len: int | None = option(None, "maximum tokens of prompt and answer together; default: the model's")
    seed: int | None = option(
        None, "makes requests without a seed reproducible: theirs follow from this one and their order"
    )
    threads: int | None = option(None, "CPU threads of the engine; default: one per physical core")
    tensor_parallel_size: int = option(
        1,
        "processes that the model is split over, each with some rows of every matrix: one per GPU, or on the CPU each "
        "with its share of the threads; answers stay the same, bit for bit",
    )
    backend: str = option(
        "penstock",
        "what computes the model; transformers: its class of that library (the extra transformers), for architectures "
        "that Penstock lacks: slower, and an answer may depend on its batch",
        ("penstock", "transformers"),
    )

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < SEED_RANGE:
            raise ConfigError(f"seed must be from 0 to {SEED_RANGE - 1}, not {self.seed}")
        parse_overrides(self.hf_overrides)


def parse_overrides(text: str | None) -> dict[str, Any]:
    """The settings of `hf_overrides`.

    Raises:
        ConfigError: it is not a JSON object.
    """
    if text is None:
        return {}
    try:
        overrides = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"hf_overrides is not valid JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f'hf_overrides must be a JSON object, as {{"rope_theta": 1000000.0}}, not {shown(overrides)}')
    return overrides


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, "tokens per KV block; default: 32 on the CPU, 16 on a GPU")
    kv_cache_memory: str | int = option(
        "auto", "bytes for the KV cache, including a draft model's (8589934592, 8GiB, 512MiB), or auto"
    )
    max_memory: str | int | None = option(
        None,
        "bytes for weights, KV cache and workspace together; default: the free memory, shared by a server's engines",
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of cached keys and values; auto: int8 with quantization, on a CPU with native kernels and without "
        "multi-head latent attention; for quantized GGUF files bfloat16 on CPUs with native bfloat16 instructions, "
        "else float16; otherwise the model's; int8: half the size of 16 bits, with a scale per token and head, and "
        "queries are quantized as well",
        ("auto", *BYTES_OF, "int8"),
    )
    enable_prefix_caching: bool = option(True, "reuse the computed blocks of common prompt prefixes")
    kv_disk: str | None = option(
        None,
        "PATH or PATH:SIZE (cache.kv:20GiB; default size: 10GiB) of a file that keeps computed blocks, also for the "
        "next start; each engine has its own file: PATH, PATH.1, ...",
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, and the order of the queue."""

    max_num_seqs: int | None = option(
        None,
        "maximum sequences that run together; default: 64 on the CPU, 256 on a GPU, or as many as have room for their "
        "recurrent states in half of the KV cache",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum tokens computed in a step; default: on the CPU 512, or 256 with one thread; on a GPU 8192; of an "
        "encoder 1024",
    )
    policy: str = option(
        "fair",
        "order of the queue: fair shares tokens between API keys, and orders each key's requests by priority and "
        "arrival; fcfs: first come, first served; priority: by priority alone",
        ("fair", "fcfs", "priority"),
    )
    max_batch_prefill_tokens: int | None = option(None, "(TGI compatibility) maximum prompt tokens computed in a step")
    max_batch_total_tokens: int | None = option(
        None, "(TGI compatibility) maximum sum of prompt tokens and max_tokens over all running sequences"
    )
    waiting_served_ratio: float | None = option(
        None,
        "(TGI compatibility) while a batch runs, admit requests only if they are at least this share of the running "
        "ones",
    )
    max_waiting_tokens: int | None = option(
        None, "(TGI compatibility) steps without an admission after which the ratio no longer applies; default: 20"
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: drafted tokens are verified in one step. Answers stay the same, bit for bit."""

    speculation: str | None = option(
        None,
        "draft the next tokens whenever that is faster: ngram looks them up in the text so far, draft uses a small "
        "model, mtp the model's own multi-token prediction head",
        ("ngram", "draft", "mtp"),
    )
    speculative_model: str | None = option(
        None, "the draft model, named like --model, with the same vocabulary; implies --speculation draft"
    )
    num_speculative_tokens: int | None = option(
        None, "maximum drafted tokens per sequence and step; default: 16, with mtp 3"
    )


Role = Literal["any", "prefill", "decode"]
"""Role of an engine: prefill (it transfers the blocks), decode, or both."""
KVTransfer = Literal["file", "nixl"]
"""Transport of a prefill engine's blocks to the others."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Low-rank adapters (LoRA), which requests select by name."""

    adapter: str | None = option(
        None,
        "name=PATH of an adapter: a folder saved by PEFT, a GGUF file or a hub id; requests select it as their model; "
        "may be given several times, or several separated by commas",
        repeated=True,
    )
    adapter_memory: str | int = option(
        "auto",
        "bytes for adapters; the least recently used are evicted; auto: the size of those given with --adapter, so "
        "that without any none can be loaded later",
    )

    @property
    def paths(self) -> dict[str, str]:
        """Path of each adapter, by name.

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
class ImageConfig:
    """Images in prompts, and their limits."""

    media: bool = option(
        True, "take images and sounds, if the model does; --no-media loads the language model alone, without encoders"
    )
    images: bool = option(True, "take images, if the model has a vision tower; --no-images saves the tower's memory")
    max_images: int = option(16, "maximum images of a request")
    max_image_bytes: int = option(20_971_520, "maximum size of an image, as a file")
    max_image_pixels: int = option(50_000_000, "maximum pixels of an image, by its header, before it is resized")
    max_image_tokens: int | None = option(
        None,
        "maximum tokens of an image, where the family lets its size choose them: larger ones are resized to it; "
        "default: the checkpoint's own, but no more than 4096",
    )
    image_cache_bytes: int = option(
        268_435_456,
        "memory for the latest resized images, or features of sounds, which later turns of a conversation send again; "
        "0: none",
    )

    def __post_init__(self) -> None:
        for name in ("max_images", "max_image_bytes", "max_image_pixels", "max_image_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.image_cache_bytes < 0:
            raise ConfigError(f"image_cache_bytes must be at least 0, not {self.image_cache_bytes}")


_MOST_AUDIO_SECONDS = 7200


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """Sounds in prompts, and limits on these and on audio that is transcribed."""

    sounds: bool = option(
        True, "take sounds, if the model has an audio encoder for prompts; --no-sounds saves the encoder's memory"
    )
    max_audio_bytes: int = option(26_214_400, "maximum size of a sound, as a file")
    max_audio_seconds: int = option(3600, "maximum length of a sound, at most 7200")
    max_sounds: int = option(16, "maximum sounds of a request")

    def __post_init__(self) -> None:
        for name in ("max_audio_bytes", "max_audio_seconds", "max_sounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_audio_seconds > _MOST_AUDIO_SECONDS:
            raise ConfigError(
                f"max_audio_seconds must be at most {_MOST_AUDIO_SECONDS}, not {self.max_audio_seconds}: "
                "the process that decodes a longer sound may run out of memory"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine, as the user gave them, and its role in the fleet."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    images: ImageConfig = field(default_factory=ImageConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)
    role: Role = "any"
    kv_transfer: KVTransfer = "file"
    rendezvous: Rendezvous | None = None
    """Rendezvous of ranks on several nodes; None: all ranks are on one machine."""

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """The configuration that flat options describe; text values are parsed as on the command line.

        Raises:
            ConfigError: an option is unknown (the message suggests the nearest), or its value is not accepted.
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
            images=ImageConfig(**parsed.get("images", {})),
            audio=AudioConfig(**parsed.get("audio", {})),
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
    "images": ImageConfig,
    "audio": AudioConfig,
}


FOREIGN_OPTIONS = {
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "n_ctx": "max_model_len",
    "gpu_memory_utilization": "kv_cache_memory",
    "mem_fraction_static": "kv_cache_memory",
    "gpu_layers": "device",
    "n_gpu_layers": "device",
    "n_threads": "threads",
    "batch_size": "max_num_batched_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "n_batch": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "parallel": "max_num_seqs",
    "num_shard": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "hf_repo": "model",
    "hf_config_overrides": "hf_overrides",
    "json_model_override_args": "hf_overrides",
    "rope_scaling": "hf_overrides",
    "chat_template_file": "chat_template",
    "model_id": "model",
    "model_path": "model",
    "draft_model": "speculative_model",
    "model_draft": "speculative_model",
    "limit_mm_per_prompt": "max_images",
    "language_model_only": "media",
    "model_impl": "backend",
    "lora": "adapter",
    "lora_modules": "adapter",
    "quantize": "quantization",
}
"""Options of vLLM, SGLang, llama.cpp and TGI, with the equivalent option here."""


_OPPOSITES = frozenset({"language_model_only"})
"""Those of them that are on where the option here is off."""


def foreign_hint(name: str) -> str:
    """The end of an error that names the option here for one in `FOREIGN_OPTIONS`."""
    return f"; here it is {FOREIGN_OPTIONS[name]!r}" + ", with the opposite value" * (name in _OPPOSITES)


def iter_options() -> "Iterator[tuple[str, Field[Any]]]":
    """Each engine option, as (section of `EngineConfig`, dataclass field)."""
    for section, cls in _SECTIONS.items():
        for f in fields(cls):
            yield section, f


def _nearest(name: str, known: dict[str, Any]) -> str:
    if name in FOREIGN_OPTIONS:
        return foreign_hint(name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def parse_value(f: "Field[Any]", value: Any) -> Any:
    """Convert `value` to the option's type: text is parsed, anything else is checked.

    Raises:
        ConfigError: the option does not accept this value.
    """
    kinds = _types_of(f)
    choices = f.metadata.get("choices", ())
    if f.metadata.get("is_json") and isinstance(value, Mapping):
        value = _json_text(f.name, value)
    is_none = value is None or (isinstance(value, str) and value.lower() == "none")
    if is_none and type(None) in kinds:
        return None
    parsed = None if is_none else _convert(value, kinds)
    if choices and parsed not in choices:
        raise ConfigError(f"{f.name} must be one of {', '.join(choices)}; not {value!r}")
    if parsed is None:
        names = " or ".join(NAMES_OF_TYPES[kind] for kind in kinds if kind is not type(None))
        raise ConfigError(f"{f.name} must be {names}, not {value!r}")
    return parsed


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must hold what JSON can: {error}") from None


NAMES_OF_TYPES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _types_of(f: "Field[Any]") -> tuple[type, ...]:
    if isinstance(f.type, types.UnionType):
        return typing.get_args(f.type)
    return (cast(type, f.type),)


def _convert(value: Any, kinds: tuple[type, ...]) -> Any:
    """Convert the value to the first type that accepts it; None if no type does."""
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
