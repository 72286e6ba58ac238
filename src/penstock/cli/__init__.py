"""The command line of `penstock`: a module for each command.

A command's module has `add_parser`, which declares its flags, and the function that runs it. The engine's flags are the
fields of the dataclasses in `penstock.config.engine_config`, by the same names, with their help.

Tested elsewhere: `tests/cli/test_commands.py`, `tests/cli/test_interrupts.py` and `tests/cli/test_sources.py` run the
commands; `serve` and `reload`: `tests/server/test_serve.py`, `verify`: `tests/diagnose/test_verify.py`, `quantize`:
`tests/quantizer/test_job.py`, `topics`: `tests/cli/test_parser.py`; `list`, `show` and `rm`: `tests/cli/test_pull.py`.
"""

import argparse
import os
import sys
from functools import partial
from importlib import import_module
from typing import NoReturn

from penstock import __version__
from penstock.cli.parser import Parser
from penstock.cli.sources import name_sources
from penstock.errors import ConfigError, PenstockError
from penstock.system.host import CLOSED_PIPE, end_process, importing, keep_own_rights

COMMANDS = (
    *("generate", "chat", "transcribe", "serve", "top", "reload", "quantize", "verify", "simulate"),
    *("pull", "list", "show", "rm", "cache", "doctor", "config", "completion"),
)
"""Modules of this package, in the order of the help."""


def run() -> NoReturn:
    """Entry point of the program `penstock`; exits with the command's exit code."""
    keep_own_rights()
    # numpy's idle threads sleep at once; by default they first spin, for 0.05 s of a core in each process that starts
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import_module("penstock.cli.completion").complete(make_parser())
    try:
        code = main()
    except SystemExit as ended:  # argparse's, after --help or a mistake
        code = ended.code if isinstance(ended.code, int) else 1
    end_process(code)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code: 2 for a caller's mistake, 130 after Ctrl-C, 141 after a closed pipe."""
    given = sys.argv[1:] if argv is None else argv
    with importing():
        parser = make_parser(given[0] if given else None)
    args = parser.parse_args(given)
    try:
        code: int = args.run(args)
    except PenstockError as error:
        message = name_sources(error, getattr(args, "given", {})) if isinstance(error, ConfigError) else str(error)
        print(f"penstock: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # so that what is still buffered fails no more
        return CLOSED_PIPE
    return code


def make_parser(first: str | None = None) -> argparse.ArgumentParser:
    """The program's parser. If the `first` argument is a command, it knows that command alone: others take time."""
    parser = Parser(prog="penstock", description="An inference server for large language models.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.set_defaults(run=partial(_print_help, parser))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (first,) if first in COMMANDS else COMMANDS:
        import_module(f"penstock.cli.{command}").add_parser(commands)
    _add_help(commands)
    return parser


def _print_help(parser: Parser, args: argparse.Namespace) -> int:
    """Print the program's help, if no command is given."""
    parser.print_help(sys.stderr)
    return 2


def _add_help(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`penstock help COMMAND`, the same as `penstock COMMAND --help`."""
    parser = commands.add_parser("help", help="show the help of a command")
    parser.add_argument("about", nargs="?", metavar="COMMAND", choices=[*commands.choices, ""], default="")
    parser.add_argument("extent", nargs="?", metavar="all", choices=["all", ""], default="")

    def run(args: argparse.Namespace) -> int:
        make_parser().parse_args([part for part in (args.about, "--help", args.extent) if part])
        return 0

    parser.set_defaults(run=run)
