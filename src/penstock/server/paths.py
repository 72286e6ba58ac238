"""Calls that are about the server itself, not about work for it."""

from starlette.types import Scope

_OPEN = frozenset(
    ("/", "/health", "/health/live", "/health/ready", "/ping", "/metrics", "/docs", "/docs/oauth2-redirect")
) | {"/openapi.json"}


def is_open(scope: Scope) -> bool:
    """Whether an HTTP call reads what needs no key, and is not worth a line in the log."""
    return scope["path"] in _OPEN and scope["method"] in ("GET", "HEAD")
