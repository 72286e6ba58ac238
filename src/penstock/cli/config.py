"""`penstock config init`: writes a file for `penstock serve --config` with every option, its help and its default."""

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

from penstock.cli.flags import given_options
from penstock.cli.parser import Parser
from penstock.cli.sources import SECRET, Given
from penstock.cli.topics import add_options, by_topic
from penstock.config.engine_config import EngineConfig, iter_options
from penstock.errors import ConfigError
from penstock.server.config import ServerConfig, iter_server_options

WIDTH = 100


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser("config", help="write a configuration file for penstock serve")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser(
        "init",
        usage="%(prog)s [options] [PATH]",
        help="write a file with every option of penstock serve",
        description="Write a TOML file with every option of `penstock serve`: those given here are set, the others are "
        "comments with their default.",
    )
    init.add_argument("path", nargs="?", default="penstock.toml", metavar="PATH", help="default: penstock.toml")
    init.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_options(init, [*iter_options(), *iter_server_options()])
    init.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = given_options(args)
    server, engine = (
        {f.name: given[f.name].value for _, f in group if f.name in given}
        for group in (iter_server_options(), iter_options())
    )
    values = ServerConfig.from_options(**server).options() | EngineConfig.from_options(**engine).options()
    try:
        # The file may hold a key: it is for its owner alone.
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if args.force else os.O_EXCL)
        with open(os.open(args.path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write("\n".join(_lines(values, given)))
    except FileExistsError:
        raise ConfigError(f"{args.path} exists: name another file, or add --force to replace it") from None
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be written: {error}") from None
    print(f"{args.path}: edit it, then run: penstock serve --config {args.path}")
    return 0


def _lines(values: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[str]:
    yield "# Options of `penstock serve --config`. Environment variables (PENSTOCK_PORT) and flags take precedence."
    for title, options in by_topic([*iter_options(), *iter_server_options()]):
        yield f"\n# ── {title} " + "─" * (WIDTH - 6 - len(title))
        for f in options:
            yield ""
            yield from textwrap.wrap(f.metadata["help"], WIDTH, initial_indent="# ", subsequent_indent="# ")
            yield _setting(f, values[f.name], f.name in given)
    yield ""


def _setting(f: "Field[Any]", value: Any, is_set: bool) -> str:
    if is_set:
        return f"{f.name} = {json.dumps(value, ensure_ascii=False)}"
    if value is None:
        return f"# {f.name} ="
    shown = '""' if f.name in SECRET else json.dumps(value, ensure_ascii=False)
    return f"# {f.name} = {shown}"
