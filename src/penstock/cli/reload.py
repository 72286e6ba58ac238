"""`penstock reload`: replaces the engines of a running server without losing a request."""

import argparse
import contextlib
import json
import os
import urllib.error
import urllib.request
from typing import Any

from penstock.errors import PenstockError

DEFAULT_URL = "http://127.0.0.1:8000"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "reload",
        help="replace a server's engines while it serves",
        description="Replace the engines of a running server one after another by engines that load the model from "
        "disk again. Requests that have started finish on the old weights. The command returns when all engines are "
        "replaced. It sends the operator's API key in PENSTOCK_API_KEY; a server without keys must run with --admin.",
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the server; default: {DEFAULT_URL}")
    parser.add_argument("--model", help="model that the new engines load; default: the old engines' model")
    parser.add_argument("--revision", help="branch, tag or commit of the model's hub repository")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = {"model": args.model, "revision": args.revision}
    body = {name: value for name, value in chosen.items() if value is not None}
    answer = post(f"{args.url.rstrip('/')}/v1/admin/reload", body, os.environ.get("PENSTOCK_API_KEY"))
    for engine in answer["engines"]:
        print(f"engine {engine['place']}: {engine['model']}, {engine['state']}, process {engine['pid']}")
    return 0


def post(url: str, body: dict[str, Any], key: str | None) -> Any:
    """Send a JSON body; the answer's JSON.

    Raises:
        PenstockError: the server does not answer, or refuses; the message has its reason.
    """
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        content = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            content = json.loads(content)["error"]["message"]
        raise PenstockError(f"{url} answered {error.code}: {content}") from None
    except (OSError, ValueError) as error:
        raise PenstockError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None
