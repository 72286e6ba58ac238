"""`penstock top`: a running server in the terminal: tokens/s, queue, KV cache, engines, requests.

Tested elsewhere: `tests/cli/top/test_top.py`.
"""

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.http import DEFAULT_URL
from penstock.cli.parser import Parser
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.cli.top.sample import Samples

KEY_VARIABLE = "PENSTOCK_API_KEY"


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="Show a server's tokens/s, queue, KV cache, engines and requests until q or Ctrl-C. With "
        "--admin or an operator's API key the engines' states and processes, too.",
    )
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help=f"address of the server, as its log has it (unix:PATH: a Unix socket); default: {DEFAULT_URL}",
    )
    parser.add_argument("--once", action="store_true", help="print one view after one interval, and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="X", help="seconds between views; default: 1")
    parser.add_argument("--api-key", metavar="KEY", dest="key", help=f"an operator's API key; default: ${KEY_VARIABLE}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 60:
        raise ConfigError(f"--interval must be between 0.1 and 60 seconds, not {args.interval:g}")
    if not args.once and not (sys.stdin.isatty() and sys.stdout.isatty() and os.name == "posix"):
        raise ConfigError("top needs a terminal of Linux or macOS: add --once to print one view")
    from penstock.cli.top.sample import Samples

    samples = Samples(args.url, args.key or os.environ.get(KEY_VARIABLE))
    samples.take()
    if args.once:
        return _print_once(samples, args.interval)
    with contextlib.suppress(KeyboardInterrupt):
        _watch(samples, args.interval)
    return 0


def _print_once(samples: "Samples", interval: float) -> int:
    from rich.console import Console

    from penstock.cli.top.view import view_of

    time.sleep(interval)
    samples.take()
    Console(highlight=False).print(view_of(samples))
    return 0


def _watch(samples: "Samples", interval: float) -> None:
    from rich.live import Live

    from penstock.cli.top.view import view_of

    with _keys_read(), Live(view_of(samples), screen=True, auto_refresh=False) as live:
        while not _is_quit(interval):
            problem = ""
            try:
                samples.take()
            except PenstockError as error:  # it may come back
                problem = str(error)
            live.update(view_of(samples, problem), refresh=True)


@contextlib.contextmanager
def _keys_read() -> Iterator[None]:
    """Context in which a typed character is read at once, and not echoed."""
    import termios  # here: not on Windows, where the other commands' help is to work
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_quit(seconds: float) -> bool:
    """Wait; returns early, and true, if q is typed or the terminal is gone."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([sys.stdin], [], [], left)
        if readable and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False
