"""Every option of the HTTP server, beside the engine's in `penstock.config`."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, cast, get_args

from penstock.config import KVTransfer, option, parse_value
from penstock.errors import ConfigError
from penstock.frontend.limits import QueueLimits
from penstock.frontend.router import ROUTERS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True)
class CallLimitsConfig:
    """Limits on open calls: memory of bodies, and the time for heads and bodies.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_connections: int = option(
        2048, "connections that may be open at once; for one more, the one that was longest without a call is closed"
    )
    max_concurrent_requests: int = option(1024, "calls that may be open at once; more are refused")
    max_header_bytes: int = option(32_768, "largest head of an HTTP request: its first line and its header fields")
    max_headers: int = option(100, "header fields that a request may have")
    max_body_bytes: int = option(4_194_304, "largest HTTP body")
    max_held_body_bytes: int = option(
        536_870_912, "largest sum of the bodies of all open calls; those of less than 64 KiB do not count"
    )
    body_timeout: float = option(30.0, "seconds in which a call's head and its body must have arrived")
    keep_alive_timeout: int = option(
        120, "seconds that a connection may be idle between calls; longer than clients and proxies keep theirs"
    )
    write_timeout: float = option(60.0, "seconds for which a client may read nothing of an answer that waits for it")

    def __post_init__(self) -> None:
        for f in fields(self):
            if not getattr(self, f.name) > 0:
                raise ConfigError(f"{f.name} must be above 0, not {getattr(self, f.name):g}")
        for smaller, larger in (
            ("max_concurrent_requests", "max_connections"),
            ("max_body_bytes", "max_held_body_bytes"),
        ):
            if getattr(self, smaller) > getattr(self, larger):
                raise ConfigError(
                    f"{larger} ({getattr(self, larger)}) must be at least {smaller} ({getattr(self, smaller)})"
                )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, how to appear, whom to let in.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every one of the machine")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = option(None, "what clients call the model; default: the checkpoint's name")
    log_level: str = option("info", "what to log on standard error", LOG_LEVELS)
    log_format: str = option("text", "lines for people, or a JSON object a line", ("text", "json"))
    log_prompts: bool = option(False, "log the text of prompts, too")
    metrics_names: str = option(
        "penstock",
        "names in /metrics: our own, or vLLM's beside them, for dashboards and autoscalers made for it",
        ("penstock", "vllm"),
    )
    otlp_endpoint: str | None = option(
        None, "send OpenTelemetry traces to this OTLP/HTTP address, as http://localhost:4318; needs the extra otel"
    )
    tls_cert: str | None = option(None, "PEM file with the server's certificate and those it depends on: serve HTTPS")
    tls_key: str | None = option(None, "PEM file with the certificate's private key; default: it is in the same file")
    tls_client_ca: str | None = option(
        None, "PEM file of authorities: only clients with a certificate of one may connect"
    )
    engines: int = option(
        1,
        "engines of this server; they share its cores and memory, are spread over NUMA nodes where there are several, "
        "and take over from one another",
    )
    prefill_engines: int = option(
        0,
        "so many of the engines compute prompts only, and hand what they computed to the others, which go on with the "
        "answers; 0: each does both",
    )
    kv_transfer: str = option(
        "file",
        "how what prefill engines computed comes to the others: they read its file, on one machine; or NIXL brings it, "
        "also between machines of a cluster, unencrypted and to whoever asks; needs the extra nixl",
        get_args(KVTransfer),
    )
    cluster: str | None = option(
        None,
        "run the engines in a Ray cluster: auto for the one that this machine is part of, HOST:PORT of its head, or "
        "ray://HOST:PORT to reach it from outside; needs the extra ray",
    )
    cluster_host: str | None = option(
        None,
        "address of this machine at which engines of the cluster reach it; default: the one by which it reaches them",
    )
    resources: str | None = option(
        None,
        "what each engine reserves in the cluster, by Ray's names (CPU=4,GPU=1,memory=16GiB); default: a CPU for each "
        "of its threads (one, unless threads is set), and a GPU if device is cuda",
    )
    nodes_per_engine: int = option(
        1,
        "nodes of the cluster that each engine's ranks (tensor_parallel_size) are divided among; threads and memory "
        "are of all of them together, resources of one node",
    )
    max_engines: int | None = option(
        None,
        "start further engines in the cluster while requests wait in the queue, up to so many, and drain them when "
        "engines suffice again",
    )
    upscale_delay: float = option(10.0, "seconds for which more engines must be wanted before they are started")
    downscale_delay: float = option(300.0, "seconds for which fewer engines must suffice before one is drained")
    router: str = option(
        "prefix",
        "which of several engines a request goes to: the one that has most of the prompt cached for its load, the next "
        "one in turn, or the one with the fewest open",
        tuple(ROUTERS),
    )
    admin: bool = option(
        False,
        "let callers without an API key add, drain and replace engines (/v1/admin); with API keys, operators may",
    )
    step_deadline: float = option(
        30.0, "seconds without a step, while there is work, after which the engine is restarted; more for large steps"
    )
    journal: str | None = option(
        None, "file for accepted requests and their tokens: after a crash of everything they are finished"
    )
    resumable_streams: bool = option(
        False,
        "give each event of a stream an id that holds its seed: sent as Last-Event-ID, it lets any server of the same "
        "model go on with a stream that was broken off",
    )
    drain_timeout: float = option(30.0, "seconds that open requests may take to end after SIGTERM")
    api_key: str | None = option(
        None, "the key that clients must send; better in PENSTOCK_API_KEY than on a command line"
    )
    api_keys: str | None = option(None, "a TOML file of keys with names and limits; docs/limits.md has its format")
    private_cache: bool = option(
        False,
        "give each API key a prefix cache of its own: the time to a first token then reveals nothing of what "
        "others sent",
    )
    gate: CallLimitsConfig = field(default_factory=CallLimitsConfig)
    queue: QueueLimits = field(default_factory=QueueLimits)

    def __post_init__(self) -> None:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise ConfigError(f"{name} needs tls_cert")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("cluster_host", "resources", "max_engines"):
            if getattr(self, name) is not None and self.cluster is None:
                raise ConfigError(f"{name} needs cluster")
        if self.nodes_per_engine < 1:
            raise ConfigError(f"nodes_per_engine must be at least 1, not {self.nodes_per_engine}")
        if self.nodes_per_engine > 1 and self.cluster is None:
            raise ConfigError("nodes_per_engine needs cluster")
        if self.engines < 1:
            raise ConfigError(f"engines must be at least 1, not {self.engines}")
        if not 0 <= self.prefill_engines < self.engines:
            raise ConfigError(
                f"prefill_engines must be from 0 to one less than engines ({self.engines}), as others go on with the "
                f"answers; not {self.prefill_engines}"
            )
        if self.kv_transfer == "nixl" and not self.prefill_engines:
            raise ConfigError("kv_transfer nixl needs prefill_engines")
        if self.prefill_engines and self.cluster is not None and self.kv_transfer == "file":
            raise ConfigError(
                "prefill_engines of a cluster hand blocks to other machines: set kv_transfer to nixl, or leave out "
                "prefill_engines or cluster"
            )
        if self.prefill_engines and self.max_engines is not None:
            raise ConfigError("prefill_engines are as many as they are: leave out max_engines, or these")
        if self.max_engines is not None and self.max_engines < self.engines:
            raise ConfigError(f"max_engines ({self.max_engines}) must be at least engines ({self.engines})")
        for name in ("upscale_delay", "downscale_delay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0 seconds, not {getattr(self, name):g}")
        if not self.step_deadline > 0:
            raise ConfigError(f"step_deadline must be above 0 seconds, not {self.step_deadline:g}")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must be at least 0 seconds, not {self.drain_timeout:g}")

    @property
    def transfer(self) -> KVTransfer:
        """How blocks come from prefill engines to others."""
        return cast(KVTransfer, self.kv_transfer)

    @classmethod
    def from_options(cls, **options: Any) -> "ServerConfig":
        """The configuration that flat options describe; text values are parsed as on the command line.

        Raises:
            ConfigError: a value is none that its option takes.
        """
        parsed: dict[str, dict[str, Any]] = {"": {}, "gate": {}, "queue": {}}
        for section, f in iter_server_options():
            if f.name in options:
                parsed[section][f.name] = parse_value(f, options[f.name])
        return cls(**parsed[""], gate=CallLimitsConfig(**parsed["gate"]), queue=QueueLimits(**parsed["queue"]))

    def options(self) -> dict[str, Any]:
        """Every option's value, flat."""
        return {
            f.name: getattr(getattr(self, section) if section else self, f.name) for section, f in iter_server_options()
        }


def iter_server_options() -> "Iterator[tuple[str, Field[Any]]]":
    """Each server option, as (section of `ServerConfig`, "" for its own; dataclass field)."""
    for section, cls in (("", ServerConfig), ("gate", CallLimitsConfig), ("queue", QueueLimits)):
        for f in fields(cls):
            if f.metadata:
                yield section, f
