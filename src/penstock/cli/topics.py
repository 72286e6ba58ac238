"""Options by topic: `--help` shows the common ones, `--help all` every one.

The topic of an option is the dataclass that it is a field of; large ones are divided here.
"""

from collections.abc import Iterable
from dataclasses import Field
from typing import Any

from penstock.cli.flags import add_config_flag, add_flags
from penstock.cli.parser import Parser

COMMON = (
    *("model", "host", "port", "served_model_name", "api_key", "engines", "journal", "default_sampling", "log_level"),
    *("device", "dtype", "quantization", "threads", "max_model_len", "kv_cache_memory", "max_num_seqs"),
    *("speculation", "adapter"),
)
"""Options that `--help` shows, in its order."""

_TITLES = {
    "model": "model",
    "cache": "memory and KV cache",
    "scheduler": "batching and the order of the queue",
    "speculation": "speculative decoding",
    "adapters": "adapters (LoRA)",
    "images": "images in prompts",
    "audio": "transcription, and sounds in prompts",
    "": "answers and streams",
    "call_limits": "limits on connections and calls",
    "queue": "limits on requests",
}
"""Titles by section of `EngineConfig` or `ServerConfig`."""
_DIVIDED = {
    "address, TLS and web pages": (
        *("host", "port", "uds", "root_path", "tls_cert", "tls_key", "tls_client_ca", "allowed_origins"),
    ),
    "several models": ("models_dir", "added_models", "keep_alive", "max_loaded_models", "load_timeout"),
    "images in prompts": ("image_urls",),
    "access": ("api_key", "api_keys", "private_cache", "admin"),
    "engines": ("engines", "prefill_engines", "kv_transfer", "router", "step_deadline", "journal", "drain_timeout"),
    "Ray cluster": (
        *("cluster", "cluster_host", "resources", "nodes_per_engine"),
        *("max_engines", "upscale_delay", "downscale_delay"),
    ),
    "logs, metrics and traces": ("log_level", "log_format", "log_prompts", "metrics_names", "otlp_endpoint"),
    "text-generation-inference's batching": (
        *("max_batch_prefill_tokens", "max_batch_total_tokens", "waiting_served_ratio", "max_waiting_tokens"),
    ),
}
_TITLE_OF = {name: title for title, names in _DIVIDED.items() for name in names}


def by_topic(options: "Iterable[tuple[str, Field[Any]]]") -> "list[tuple[str, list[Field[Any]]]]":
    """The options, given with their sections, by title: the common ones first, in the order of `COMMON`.

    Engine options come before those of the server, whose own are divided into several topics.
    """
    common: dict[str, Field[Any]] = {}
    topics: dict[str, list[Field[Any]]] = {}
    for section, f in options:
        if f.name in COMMON:
            common[f.name] = f
        else:
            topics.setdefault(_TITLE_OF.get(f.name, _TITLES[section]), []).append(f)
    return [("common options", [common[name] for name in COMMON if name in common]), *topics.items()]


def add_options(parser: Parser, options: "Iterable[tuple[str, Field[Any]]]") -> None:
    """Add a flag for each option, given with its section: common ones in a group, the others by topic."""
    (_, common), *topics = by_topic(options)
    add_flags(parser.common, common)
    add_config_flag(parser.common)
    for title, fields in topics:
        add_flags(parser.add_topic(title), fields)
