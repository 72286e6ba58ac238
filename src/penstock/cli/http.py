"""Calls from the command line to a running server, at a URL or `unix:PATH`."""

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.request
from typing import Any

from penstock.errors import PenstockError

DEFAULT_URL = "http://127.0.0.1:8000"


def open_path(
    server: str, path: str, body: dict[str, Any] | None = None, key: str | None = None, timeout: float | None = None
) -> http.client.HTTPResponse:
    """Get a path of a server, or post a JSON body to it. The caller closes the response.

    Args:
        server: a URL, with or without a final `/v1`, or `unix:PATH`.
        timeout: seconds without a byte after which the server counts as lost; None: no limit.

    Raises:
        PenstockError: the server does not answer, or refuses; the message has its reason.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if body is not None:
        headers["content-type"] = "application/json"
    socket_path = server.removeprefix("unix:") if server.startswith("unix:") else None
    handlers = [_UnixHandler(socket_path), urllib.request.ProxyHandler({})] if socket_path else []
    try:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base_url(server) + path, content, headers)
        response: http.client.HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            reason = json.loads(reason)["error"]["message"]
        raise PenstockError(f"{server} answered {error.code}: {reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PenstockError(f"no answer from {server}: {getattr(error, 'reason', error)}") from None
    return response


def base_url(server: str) -> str:
    """The URL that paths such as `/v1/models` are appended to."""
    if server.startswith("unix:"):
        return "http://localhost"
    url = server if "://" in server else f"http://{server}"
    return url.rstrip("/").removesuffix("/v1")


def call(
    server: str, path: str, body: dict[str, Any] | None = None, key: str | None = None, timeout: float | None = None
) -> Any:
    """The JSON of the answer to `open_path`.

    Raises:
        PenstockError: as `open_path`; also if the answer is no JSON.
    """
    with open_path(server, path, body, key, timeout) as response:
        try:
            return json.load(response)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise PenstockError(f"{server}{path} answered no JSON: {error}") from None


class _UnixHandler(urllib.request.HTTPHandler):
    """Opens URLs over a Unix socket, whatever their host is."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, req)

    def _connection(self, host: str, **options: Any) -> http.client.HTTPConnection:
        return _UnixConnection(self._path, **options)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__("localhost", **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)
