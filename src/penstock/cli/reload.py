"""`penstock reload`: replaces the engines of a running server without losing a request."""

import argparse
import contextlib
import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from typing import Any

from penstock.cli.parser import Parser
from penstock.errors import PenstockError

DEFAULT_URL = "http://127.0.0.1:8000"


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "reload",
        help="replace a server's engines while it serves",
        description="Replace the engines of a running server one after another by engines that load the model from "
        "disk again. Requests that have started finish on the old weights. The command returns when all engines are "
        "replaced. It sends the operator's API key in PENSTOCK_API_KEY; a server without keys must run with --admin.",
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help=f"address of the server, as its log has it (unix:PATH: a Unix socket); default: {DEFAULT_URL}",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="model that the new engines load; default: the old engines' model"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the model's hub repository")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = {"model": args.model, "revision": args.revision}
    body = {name: value for name, value in chosen.items() if value is not None}
    answer = post(args.url, "/v1/admin/reload", body, os.environ.get("PENSTOCK_API_KEY"))
    for engine in answer["engines"]:
        print(f"engine {engine['place']}: {engine['model']}, {engine['state']}, process {engine['pid']}")
    return 0


def post(server: str, path: str, body: dict[str, Any], key: str | None) -> Any:
    """Send a JSON body to a server at a URL or unix:PATH; the answer's JSON.

    Raises:
        PenstockError: the server does not answer, or refuses; the message has its reason.
    """
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    socket_path = server.removeprefix("unix:") if server.startswith("unix:") else None
    url = f"{'http://localhost' if socket_path else server.rstrip('/')}{path}"
    handlers = [_UnixHandler(socket_path), urllib.request.ProxyHandler({})] if socket_path else []
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.build_opener(*handlers).open(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        content = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            content = json.loads(content)["error"]["message"]
        raise PenstockError(f"{server} answered {error.code}: {content}") from None
    except (OSError, ValueError) as error:
        raise PenstockError(f"no answer from {server}: {getattr(error, 'reason', error)}") from None


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
