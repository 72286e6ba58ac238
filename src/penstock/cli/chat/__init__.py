"""`penstock chat`: a conversation with a model in the terminal.

    terminal or plain ──> Session ──> Backend: LocalBackend (a model in this process)
         │ /command          │                 RemoteBackend (a server, by OpenAI's API)
         └──> commands ──────┘

`terminal` draws with prompt_toolkit and rich, and only it imports them. `plain` is for pipes.

Tested elsewhere: `tests/cli/chat/test_local.py`, `tests/cli/chat/test_remote.py` and `tests/cli/chat/test_commands.py`
test sessions whole.
"""

import argparse
import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.cli.flags import SEVERAL, add_positional_model, add_sampling_flags, take_positional_model
from penstock.cli.parser import Parser
from penstock.cli.topics import add_options
from penstock.config.engine_config import iter_options
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.chat.backend import Backend
    from penstock.cli.chat.session import Session

PLAIN_HELP = "Type a message. /reset starts a new conversation, Ctrl-C stops an answer, /exit or Ctrl-D ends."


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a model",
        usage="%(prog)s [options] [MODEL]",
        description="Chat with a model: one in this process, or one that a server serves (--url). Type /help there.",
    )
    add_positional_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--url",
        help="chat with a running server by OpenAI's API (unix:PATH: a Unix socket); --model is then a name that it "
        "serves; default: the first",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", dest="key", help="API key for --url; default: that of PENSTOCK_API_KEY"
    )
    add_options(parser, iter_options())
    add_sampling_flags(parser, without=SEVERAL)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    take_positional_model(args)
    if sys.stdin.isatty() and sys.stdout.isatty():
        from penstock.cli.chat.terminal import run_terminal, typing_held

        with typing_held(), closing(_backend(args)) as backend:
            run_terminal(_session(args, backend))
        return 0
    from penstock.cli.chat.plain import run_plain

    with closing(_backend(args)) as backend:
        print(PLAIN_HELP, file=sys.stderr)
        run_plain(_session(args, backend))
    return 0


def _session(args: argparse.Namespace, backend: "Backend") -> "Session":
    from penstock.cli.chat.conversation import Conversation
    from penstock.cli.chat.session import Session

    return Session(backend, Conversation(args.system or ""))


def _backend(args: argparse.Namespace) -> "Backend":
    """
    Raises:
        ConfigError: flags of an engine or of a server without the other's.
    """
    if args.url is None:
        if args.key is not None:
            raise ConfigError("--api-key is for --url: a model in this process needs none")
        from penstock.cli.chat.local import LocalBackend

        return LocalBackend(args)
    given = [f.name for _, f in iter_options() if f.name != "model" and hasattr(args, f.name)]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for a model in this process: leave it out beside --url")
    from penstock.cli.chat.remote import RemoteBackend

    return RemoteBackend(args.url, args.key or os.environ.get("PENSTOCK_API_KEY"), args)
