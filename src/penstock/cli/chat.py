"""`penstock chat`: a conversation with a model in the terminal."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.flags import add_engine_flags, add_sampling_flags, only_adapter, open_llm, sampling_params
from penstock.errors import InvalidRequestError
from penstock.sampling_params import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM

CHAT_HELP = "Type a message. /reset starts a new conversation, /exit or Ctrl-D ends."


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="chat with a model", description=f"Chat with a model. {CHAT_HELP}")
    parser.add_argument("--system", help="the system message")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params, adapter = sampling_params(args), only_adapter(args)
    if params.n != 1:
        raise InvalidRequestError("a chat has one answer a turn: leave --n out", "n")
    if params.logprobs is not None:
        raise InvalidRequestError("a chat prints no log-probabilities: leave --logprobs out", "logprobs")
    params.check_streamable()
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with open_llm(args) as llm:
        print(CHAT_HELP, file=sys.stderr)
        messages = list(opening)
        for line in _lines_typed():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params, adapter)})
            except InvalidRequestError as error:  # too long by now, for one: the conversation stays as it was
                print(f"penstock: error: {error}", file=sys.stderr)
                messages.pop()
    return 0


def _lines_typed() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams, adapter: str | None) -> str:
    parts = []
    for delta in llm.stream(llm.encode_chat(messages), params, adapter=adapter):
        print(delta.text, end="", flush=True)
        parts.append(delta.text)
        if delta.error is not None:
            print(f"penstock: error: {delta.error}", file=sys.stderr)
    print()
    return "".join(parts)
