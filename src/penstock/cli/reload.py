"""`penstock reload`: replaces the engines of a running server without losing a request."""

import argparse
import os
from typing import Any

from penstock.cli.http import DEFAULT_URL, call
from penstock.cli.parser import Parser


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
    answer: Any = call(args.url, "/v1/admin/reload", body, os.environ.get("PENSTOCK_API_KEY"))
    for engine in answer["engines"]:
        print(f"engine {engine['place']}: {engine['model']}, {engine['state']}, process {engine['pid']}")
    return 0
