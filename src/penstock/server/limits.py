"""The limits on HTTP calls, beside those on the queue in `penstock.engine.limits`."""

from dataclasses import dataclass

from penstock.config import option
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What calls may hold at one time, and how long their bodies may take.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_concurrent_requests: int = option(1024, "calls that may be open at once; more are refused")
    max_body_bytes: int = option(4_194_304, "largest HTTP body")
    body_timeout: float = option(30.0, "seconds in which a call's head and its body must have arrived")
    keep_alive_timeout: int = option(
        120, "seconds that a connection may be idle between calls; longer than clients and proxies keep theirs"
    )
    write_timeout: float = option(60.0, "seconds for which a client may read nothing of an answer that waits for it")

    def __post_init__(self) -> None:
        positive = ("max_concurrent_requests", "max_body_bytes", "body_timeout", "keep_alive_timeout", "write_timeout")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name):g}")
