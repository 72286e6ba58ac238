"""Normalises request paths to the documented ones."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_WITHOUT_VERSION = re.compile(r"/(chat/completions|completions|embeddings|messages|models|responses)(?=/|$)")


class ClientPaths:
    """ASGI middleware: accepts a slash at a path's end, `/v1` twice, and OpenAI's and Anthropic's paths without `/v1`.

    Some clients append `/v1` to their base URL and others do not, which users easily get wrong. A proxy may publish the
    server under a prefix, stripped or not: inner layers always see `path` without the prefix, which is `root_path`.
    """

    def __init__(self, app: ASGIApp, prefix: str = "") -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            prefix = self._prefix or scope.get("root_path", "").rstrip("/")
            scope = {**scope, "root_path": prefix, "path": usual_path(without_prefix(scope["path"], prefix))}
        await self._app(scope, receive, send)


def without_prefix(path: str, prefix: str) -> str:
    """The path without the proxy's prefix."""
    if prefix and path == prefix:
        return "/"
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def usual_path(path: str) -> str:
    """The path that the documentation lists."""
    if path.endswith("/") and not path.endswith("//"):
        path = path[:-1] or "/"
    # Clients add /v1 to a base URL that ends with it already.
    if path.startswith("/v1/v1/"):
        return path.removeprefix("/v1")
    return f"/v1{path}" if _WITHOUT_VERSION.match(path) else path
