"""Every option of the HTTP server, beside the engine's in `penstock.config.engine_config`."""

import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import Field, field, fields
from typing import Any, Literal, cast, get_args

from penstock.api.sampling_params import DEFAULTABLE, SamplingParams
from penstock.config.engine_config import KVTransfer, option, parse_value
from penstock.dataclass import dataclass
from penstock.errors import ConfigError, InvalidRequestError
from penstock.fleet.router import ROUTERS
from penstock.frontend.limits import QueueLimits

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_PREFIX = re.compile(r"/|(/[A-Za-z0-9._~-]+)+/?")
MAX_ENGINES = 1024
"""Maximum engines of a server."""


Takes = Literal["text", "images", "audio"]
"""What a model takes beside text."""
_BODY_BYTES: dict[Takes, int] = {"text": 4 * 2**20, "images": 20 * 2**20, "audio": 27 * 2**20}


@dataclass(frozen=True, slots=True)
class CallLimitsConfig:
    """Limits on open calls: memory of bodies, and the time for heads and bodies.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_connections: int = option(2048, "maximum open connections; above it, the longest-idle one is closed")
    max_concurrent_requests: int = option(1024, "maximum concurrent calls; more are refused")
    max_header_bytes: int = option(32_768, "maximum size of an HTTP request's head (request line and header fields)")
    max_headers: int = option(100, "maximum header fields of a request")
    max_body_bytes: int | None = option(
        None,
        "maximum size of an HTTP body; default: 4194304; 20971520 of a model that takes images, "
        "28311552 of one that takes audio",
    )
    max_held_body_bytes: int = option(
        536_870_912, "maximum total size of the bodies of all open calls; bodies below 64 KiB do not count"
    )
    body_timeout: float = option(30.0, "seconds within which a call's head, and then its body, must arrive")
    keep_alive_timeout: int = option(
        120, "seconds that a connection may be idle between calls; should exceed the clients' and proxies' own timeout"
    )
    write_timeout: float = option(
        60.0, "seconds without reading any of its answer after which a client's connection is closed"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not value > 0:
                raise ConfigError(f"{f.name} must be above 0, not {value:g}")
        for smaller, larger in (
            ("max_concurrent_requests", "max_connections"),
            ("max_body_bytes", "max_held_body_bytes"),
        ):
            if (getattr(self, smaller) or 0) > getattr(self, larger):
                raise ConfigError(
                    f"{larger} ({getattr(self, larger)}) must be at least {smaller} ({getattr(self, smaller)})"
                )

    def body_bytes(self, takes: Takes) -> int:
        """Maximum size of an HTTP body."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(self.max_held_body_bytes, _BODY_BYTES[takes])


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Address, model name, access, logs, and the fleet of engines.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = option(8000, "port to listen on; 0: any free port")
    uds: str | None = option(
        None, "Unix socket to listen on instead of host and port; its user and group may connect (mode 0660)"
    )
    root_path: str | None = option(
        None, "path at which a proxy publishes the server, such as /penstock, whether the proxy removes it or not"
    )
    served_model_name: str | None = option(
        None,
        "the model's name for clients, or several separated by commas; answers to requests without a model have the "
        "first; default: the checkpoint's",
    )
    default_sampling: str | None = option(
        None,
        'sampling of requests that set none, as JSON: {"temperature": 0.7, "top_p": 0.9}; also top_k, min_p, typical_p '
        "and repetition_penalty; overrides the checkpoint's defaults",
        is_json=True,
    )
    strict_fields: bool = option(
        False, "refuse unknown fields of requests; by default they are accepted and named in penstock-ignored"
    )
    allowed_origins: str | None = option(
        None,
        "origins, separated by commas, whose web pages may call the server (https://example.org, app://obsidian.md; *: "
        "all); pages on loopback addresses always may",
    )
    log_level: str = option("info", "minimum level of messages logged to standard error", LOG_LEVELS)
    log_format: str = option("text", "text, or one JSON object per line", ("text", "json"))
    log_prompts: bool = option(False, "log prompts, too")
    metrics_names: str = option(
        "penstock",
        "names in /metrics: Penstock's own, or vLLM's in addition, for dashboards and autoscalers made for vLLM",
        ("penstock", "vllm"),
    )
    otlp_endpoint: str | None = option(
        None, "OTLP/HTTP address for OpenTelemetry traces, for example http://localhost:4318; needs the extra otel"
    )
    tls_cert: str | None = option(None, "PEM file with the server's certificate chain; enables HTTPS")
    tls_key: str | None = option(None, "PEM file with the private key; default: in the file of tls_cert")
    tls_client_ca: str | None = option(
        None, "PEM file of certificate authorities; clients then need a certificate from one of them"
    )
    models_dir: str | None = option(
        None, "folder of models, each a folder or GGUF file, which are served by their names and loaded when used"
    )
    added_models: str | None = option(
        "auto",
        "file of the models, names and adapters that clients add by Ollama's API, which the next server has again; "
        "auto: one for the port or Unix socket below ~/.local/share/penstock/models/servers, with port 0 none; none: "
        "they end with the server",
    )
    keep_alive: str | None = option(
        None,
        "time without requests after which a model is unloaded until the next one for it (30s, 5m, 1h; -1: never); "
        "default: 5m with several models, never with one",
    )
    max_loaded_models: int = option(
        3, "maximum models in memory at a time; each is given an equal share of max_memory, or more if it needs more"
    )
    load_timeout: str = option(
        "10m",
        "time without progress (30s, 10m) after which the load of one of several models is ended, so that calls which "
        "wait for it fail; -1: never. Downloads have time limits of their own",
    )
    engines: int = option(
        1,
        "number of engines; they share the machine's cores and memory, are spread over its NUMA nodes, and take over "
        "from one another",
    )
    prefill_engines: int = option(
        0,
        "number of the engines that only compute prompts, and transfer the KV blocks to the others, which decode; 0: "
        "every engine does both",
    )
    kv_transfer: str = option(
        "file",
        "transport of KV blocks from prefill engines: file, on one machine; nixl, also between machines of a cluster, "
        "without encryption or authentication (needs the extra nixl)",
        get_args(KVTransfer),
    )
    cluster: str | None = option(
        None,
        "run the engines in a Ray cluster: auto (the one that this machine is part of), HOST:PORT of its head, or "
        "ray://HOST:PORT from outside; needs the extra ray",
    )
    cluster_host: str | None = option(
        None,
        "address of this machine that the cluster's engines connect to; default: the one that routes to the cluster",
    )
    resources: str | None = option(
        None,
        "resources that each engine reserves in the cluster, by Ray's names (CPU=4,GPU=1,memory=16GiB); default: one "
        "CPU per thread (one thread per rank, unless threads is set), and with --device cuda one GPU per rank",
    )
    nodes_per_engine: int = option(
        1,
        "nodes of the cluster that the ranks of each engine (tensor_parallel_size) are divided among; threads and "
        "memory options are totals over these nodes, resources are per node",
    )
    max_engines: int | None = option(
        None,
        "autoscaling: maximum engines in the cluster, started while requests queue and drained when fewer suffice",
    )
    upscale_delay: float = option(10.0, "seconds for which more engines must be needed before they are started")
    downscale_delay: float = option(300.0, "seconds for which fewer engines must suffice before one is drained")
    router: str = option(
        "prefix",
        "choice of the engine for a request: prefix weighs cached prompt tokens against load, least-loaded takes the "
        "one with the fewest open sequences, round-robin each in turn",
        tuple(ROUTERS),
    )
    admin: bool = option(
        False,
        "on a server without API keys: accept /v1/admin and adapter routes (with keys, operators may use them)",
    )
    step_deadline: float = option(
        30.0, "seconds without a step, while there is work, after which the engine is replaced; large steps get more"
    )
    journal: str | None = option(
        None, "file that records accepted requests and their tokens; a server that is restarted with it finishes them"
    )
    image_urls: str | None = option(
        None,
        "https prefixes, separated by commas, from which images are fetched (https://example.org/pictures/); by "
        "default none is: clients send data URLs",
    )
    max_stored_response_bytes: int = option(
        67_108_864,
        "maximum memory of stored responses, which previous_response_id continues; above it, the tenant that holds the "
        "most loses its least recently used; 0 stores none",
    )
    resumable_streams: bool = option(
        False,
        "give each event of a stream an id with which any server of the same model can continue a broken stream "
        "(header Last-Event-ID)",
    )
    drain_timeout: float = option(30.0, "seconds that open requests may run on after SIGTERM or Ctrl-C")
    api_key: str | None = option(None, "key that clients must send; preferably set as PENSTOCK_API_KEY")
    api_keys: str | None = option(None, "TOML file of keys with names and limits; its format is in docs/limits.md")
    private_cache: bool = option(
        False,
        "give each API key its own prefix cache, so that response times reveal nothing about other keys' prompts",
    )
    call_limits: CallLimitsConfig = field(default_factory=CallLimitsConfig)
    queue: QueueLimits = field(default_factory=QueueLimits)

    def __post_init__(self) -> None:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise ConfigError(f"{name} needs tls_cert")
        _parse_sampling(self.default_sampling)
        if self.root_path and not _PREFIX.fullmatch(self.root_path):
            raise ConfigError(f"root_path must be a path such as /penstock, not {self.root_path!r}")
        self._check_uds()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("cluster_host", "resources", "max_engines"):
            if getattr(self, name) is not None and self.cluster is None:
                raise ConfigError(f"{name} needs cluster")
        if self.nodes_per_engine < 1:
            raise ConfigError(f"nodes_per_engine must be at least 1, not {self.nodes_per_engine}")
        if self.nodes_per_engine > 1 and self.cluster is None:
            raise ConfigError("nodes_per_engine needs cluster")
        for name, count in (("engines", self.engines), ("max_engines", self.max_engines)):
            if count is not None and not 1 <= count <= MAX_ENGINES:
                raise ConfigError(f"{name} must be from 1 to {MAX_ENGINES}, not {count}")
        if not 0 <= self.prefill_engines < self.engines:
            raise ConfigError(
                f"prefill_engines must be from 0 to {self.engines - 1}, as at least one of the {self.engines} engines "
                f"must decode; not {self.prefill_engines}"
            )
        if self.kv_transfer == "nixl" and not self.prefill_engines:
            raise ConfigError("kv_transfer nixl needs prefill_engines")
        if self.prefill_engines and self.cluster is not None and self.kv_transfer == "file":
            raise ConfigError(
                "prefill_engines in a cluster transfer blocks between machines: set kv_transfer to nixl, or leave out "
                "prefill_engines or cluster"
            )
        if self.prefill_engines and self.max_engines is not None:
            raise ConfigError("max_engines does not work with prefill_engines: leave out one of them")
        if self.max_engines is not None and self.max_engines < self.engines:
            raise ConfigError(f"max_engines ({self.max_engines}) must be at least engines ({self.engines})")
        for name in ("upscale_delay", "downscale_delay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0 seconds, not {getattr(self, name):g}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint must be like http://localhost:4318, not {self.otlp_endpoint!r}")
        self._check_models()
        if not self.step_deadline > 0:
            raise ConfigError(f"step_deadline must be above 0 seconds, not {self.step_deadline:g}")
        if self.max_stored_response_bytes < 0:
            raise ConfigError(f"max_stored_response_bytes must be at least 0, not {self.max_stored_response_bytes}")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must be at least 0 seconds, not {self.drain_timeout:g}")

    def _check_models(self) -> None:
        if self.max_loaded_models < 1:
            raise ConfigError(f"max_loaded_models must be at least 1, not {self.max_loaded_models}")
        for name in ("keep_alive", "load_timeout"):
            given = getattr(self, name)
            try:
                seconds = 1.0 if given is None else seconds_of(given)
            except ValueError:
                raise ConfigError(f"{name} must be a time such as 5m, or -1, not {given!r}") from None
            if name == "load_timeout" and not seconds:
                raise ConfigError("load_timeout must be above 0 seconds, or -1")

    def _check_uds(self) -> None:
        if self.uds is None:
            return
        if not self.uds:
            raise ConfigError("uds names no file: give the path of the Unix socket")
        for f in fields(self):
            if f.name in ("host", "port") and getattr(self, f.name) != f.default:
                raise ConfigError(f"uds listens on a Unix socket instead of a host and port: leave out {f.name} or uds")

    @property
    def prefix(self) -> str:
        """`root_path` without a slash at its end; empty: there is none."""
        return (self.root_path or "").rstrip("/")

    @property
    def served_model_names(self) -> list[str]:
        """The model's names for clients; none: the checkpoint's."""
        return _listed(self.served_model_name)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The values of `default_sampling` by the names of `DEFAULTABLE`."""
        return _parse_sampling(self.default_sampling)

    @property
    def listed_origins(self) -> list[str]:
        """Origins whose pages may call the server, besides those on loopback addresses."""
        return _listed(self.allowed_origins)

    @property
    def listed_image_urls(self) -> list[str]:
        """Prefixes of URLs from which images are fetched."""
        return _listed(self.image_urls)

    @property
    def transfer(self) -> KVTransfer:
        """Transport of blocks from prefill engines to the others."""
        return cast(KVTransfer, self.kv_transfer)

    @classmethod
    def from_options(cls, **options: Any) -> "ServerConfig":
        """The configuration that flat options describe; text values are parsed as on the command line.

        Raises:
            ConfigError: an option does not accept its value.
        """
        parsed: dict[str, dict[str, Any]] = {"": {}, "call_limits": {}, "queue": {}}
        for section, f in iter_server_options():
            if f.name in options:
                parsed[section][f.name] = parse_value(f, options[f.name])
        return cls(
            **parsed[""], call_limits=CallLimitsConfig(**parsed["call_limits"]), queue=QueueLimits(**parsed["queue"])
        )

    def options(self) -> dict[str, Any]:
        """Every option's value, flat."""
        return {
            f.name: getattr(getattr(self, section) if section else self, f.name) for section, f in iter_server_options()
        }


_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(sorted(_UNITS, key=len, reverse=True))})")
_DURATION = re.compile(rf"-?(?:{_PART.pattern}){{1,8}}")


def seconds_of(duration: float | str) -> float:
    """Parse a duration as Ollama does: seconds, or a text such as 1h30m; below 0: infinite.

    Raises:
        ValueError: it is not a duration.
    """
    if isinstance(duration, str) and _DURATION.fullmatch(duration):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(duration))
        return math.inf if duration.startswith("-") else seconds
    seconds = float(duration)
    if math.isnan(seconds):
        raise ValueError(duration)
    return math.inf if seconds < 0 else seconds


def _parse_sampling(text: str | None) -> dict[str, Any]:
    """
    Raises:
        ConfigError: it is not a JSON object of sampling defaults.
    """
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"default_sampling is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f'default_sampling must be a JSON object, as {{"temperature": 0.7}}, not {text}')
    for name, value in given.items():
        if name not in DEFAULTABLE:
            close = difflib.get_close_matches(name, DEFAULTABLE, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(DEFAULTABLE)}"
            raise ConfigError(f"default_sampling has the unknown name {name!r}; {hint}")
        if value is None:
            raise ConfigError(f"default_sampling: {name} must be a number, not null")
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise ConfigError(f"default_sampling: {error}") from None
    return given


def _listed(text: str | None) -> list[str]:
    """The values of an option that takes several, separated by commas."""
    return [value.strip() for value in (text or "").split(",") if value.strip()]


def iter_server_options() -> "Iterator[tuple[str, Field[Any]]]":
    """Each server option, as (section of `ServerConfig`, "" for its own; dataclass field)."""
    for section, cls in (("", ServerConfig), ("call_limits", CallLimitsConfig), ("queue", QueueLimits)):
        for f in fields(cls):
            if f.metadata:
                yield section, f
