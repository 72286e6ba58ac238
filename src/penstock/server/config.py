"""Every option of the HTTP server, beside the engine's in `penstock.config`."""

from dataclasses import dataclass

from penstock.config import option
from penstock.errors import ConfigError

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, and how to appear.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every one of the machine")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = option(None, "what clients call the model; default: the checkpoint's name")
    log_level: str = option("info", "what to log on standard error", LOG_LEVELS)
    step_deadline: float = option(
        30.0, "seconds without a step, while there is work, after which the engine is restarted; more for large steps"
    )
    drain_timeout: float = option(30.0, "seconds that open requests may take to end after SIGTERM")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if not self.step_deadline > 0:
            raise ConfigError(f"step_deadline must be above 0 seconds, not {self.step_deadline:g}")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must be at least 0 seconds, not {self.drain_timeout:g}")
