"""The limits on HTTP calls, beside those on the queue in `penstock.frontend.limits`."""

from dataclasses import dataclass, fields

from penstock.config import option
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CallLimitsConfig:
    """What calls may hold at one time, and how long their heads and bodies may take.

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
