"""`penstock chat`: a conversation with a model in the terminal."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.api.sampling_params import SamplingParams
from penstock.cli.flags import (
    SEVERAL,
    add_sampling_flags,
    fill_sampling,
    only_adapter,
    open_llm,
    sampling_params,
)
from penstock.cli.parser import Parser
from penstock.cli.topics import add_options
from penstock.config.engine_config import iter_options
from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from penstock.llm import LLM

CHAT_HELP = "Type a message. /reset starts a new conversation, Ctrl-C stops an answer, /exit or Ctrl-D ends."


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "chat", help="chat with a model", usage="%(prog)s [options]", description=f"Chat with a model. {CHAT_HELP}"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_options(parser, iter_options())
    add_sampling_flags(parser, without=SEVERAL)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params, adapter = sampling_params(args), only_adapter(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with open_llm(args, chats=True) as llm:
        params = fill_sampling(params, llm)
        print(CHAT_HELP, file=sys.stderr)
        messages = list(opening)
        for line in _lines_typed():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            question = {"role": "user", "content": line}
            try:
                answer = _answer(llm, [*messages, question], params, adapter)
            except InvalidRequestError as error:  # too long by now, for one: the conversation stays as it was
                print(f"penstock: error: {error}", file=sys.stderr)
                continue
            if answer is not None:
                messages += [question, {"role": "assistant", "content": answer}]
    return 0


def _lines_typed() -> Iterator[str]:
    is_typed = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print("\n/exit or Ctrl-D ends.", file=sys.stderr)
            continue
        if line:
            yield line


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams, adapter: str | None) -> str | None:
    """Stream the answer to the terminal and return it. Ctrl-C ends it; None if it had no text yet."""
    parts: list[str] = []
    try:
        for delta in llm.stream(llm.encode_chat(messages), params, adapter=adapter):
            print(delta.text, end="", flush=True)
            parts.append(delta.text)
            if delta.error is not None:
                print(f"penstock: error: {delta.error}", file=sys.stderr)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        return "".join(parts) or None
    finally:
        print()
    return "".join(parts)
