"""`penstock generate`: answers prompts from arguments, a file or standard input."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.request import RequestOutput
from penstock.api.sampling_params import SamplingParams
from penstock.cli.answers import AnswerWriter, open_writer, read_answered
from penstock.cli.flags import (
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
from penstock.system.host import interrupts_held

if TYPE_CHECKING:
    from tqdm import tqdm

    from penstock.llm import LLM

_RAW_PROMPTS = "the model has no chat template (--chat-template FILE gives one): prompts are sent as they are"


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="answer prompts",
        usage="%(prog)s [options] [PROMPT ...]",
        description="Answer one or more prompts.",
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="one or more prompts; default: standard input")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from this file")
    parser.add_argument("--lines", action="store_true", help="each line of the file or standard input is a prompt")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, one per line, as they end"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="append the JSON objects to this file; prompts that it answers already are skipped",
    )
    add_options(parser, iter_options())
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    params, adapter = sampling_params(args), only_adapter(args)
    if params.logprobs is not None and not args.json and not args.output:
        raise InvalidRequestError(
            "--logprobs are printed as JSON only: add --json, or leave --logprobs out", "logprobs"
        )
    if params.max_tokens == 0 and not args.json and not args.output:
        raise InvalidRequestError("--max-tokens 0 leaves no answer to print: raise it, or add --json", "max_tokens")
    if args.system and args.raw:
        raise InvalidRequestError("--raw applies no chat template, so nothing takes --system: leave one out", "system")
    answered = read_answered(args.output, prompts) if args.output else set()
    open_indices = [index for index in range(len(prompts)) if index not in answered]
    if answered:
        print(f"{args.output} answers {len(answered)} of {len(prompts)} prompts already", file=sys.stderr)
    if not open_indices:
        return 0
    with open_llm(args, chats=False, renders=not args.raw) as llm:
        params, tokenizer = fill_sampling(params, llm), llm.tokenizer
        has_template = tokenizer is not None and tokenizer.has_chat_template
        if not has_template and not args.raw:
            print(_RAW_PROMPTS, file=sys.stderr)
        templated = has_template and not args.raw
        texts = [prompts[index] for index in open_indices]
        if args.system and not templated:
            raise InvalidRequestError("the model has no chat template, so nothing takes --system", "system")
        opening = [{"role": "system", "content": args.system}] if args.system else []
        inputs = [
            llm.encode_chat([*opening, {"role": "user", "content": text}]) if templated else text for text in texts
        ]
        if len(inputs) == 1 and params.n == 1 and params.is_streamable and not args.json and not args.output:
            return _print_stream(llm, inputs[0], params, adapter)
        outputs = llm.generate_unordered(inputs, params, adapter=adapter)
        with open_writer(prompts, args.json, args.output) as writer:
            return _write_all(((open_indices[index], output) for index, output in outputs), len(open_indices), writer)


def _write_all(outputs: Iterable[tuple[int, RequestOutput]], count: int, writer: AnswerWriter) -> int:
    """Write each output as it completes, so that Ctrl-C loses no complete output."""
    errors: list[str | None] = []
    num_written = 0
    try:
        with _bar(count) as bar:
            for index, output in outputs:
                with interrupts_held():
                    writer.write(index, output)
                    num_written += 1
                    bar.update()
                errors.extend(answer.error for answer in output.outputs)
    except KeyboardInterrupt:
        print(f"interrupted: {num_written} of {count} prompts were answered", file=sys.stderr)
        raise
    finally:
        writer.finish()
    return _exit_code(errors)


def _bar(count: int) -> "tqdm[Any]":
    """A progress bar of requests; disabled for a single request, or if the printed answers show the progress."""
    from tqdm import tqdm

    is_shown = count > 1 and not (sys.stdout.isatty() and sys.stderr.isatty())
    return tqdm(total=count, unit="request", disable=not is_shown, mininterval=0.1 if sys.stderr.isatty() else 5.0)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt and (args.file or args.lines):
        raise InvalidRequestError("give prompts as arguments, or with --file or on standard input; not both")
    if args.prompt:
        return list(args.prompt)
    if args.file is None and sys.stdin.isatty():
        raise InvalidRequestError("no prompt: give one as an argument, with --file or on standard input")
    try:
        text = args.file.read_text() if args.file else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}") from None
    if not text.strip():
        raise InvalidRequestError(f"no prompt: {args.file or 'standard input'} is empty")
    return [line for line in text.splitlines() if line.strip()] if args.lines else [text]


def _print_stream(llm: "LLM", prompt: str | list[int], params: SamplingParams, adapter: str | None) -> int:
    errors = []
    try:
        for delta in llm.stream(prompt, params, adapter=adapter):
            print(delta.text, end="", flush=True)
            errors.append(delta.error)
    finally:
        print()
    return _exit_code(errors)


def _exit_code(errors: Iterable[str | None]) -> int:
    """Print the errors of sequences; returns the exit code, 1 if there are any."""
    found = [error for error in errors if error is not None]
    for error in found:
        print(f"penstock: error: {error}", file=sys.stderr)
    return 1 if found else 0
