"""The command line: `penstock generate`, `penstock chat`, `penstock serve`, `penstock verify`.

The engine's flags are the fields of the dataclasses in `penstock.config`, by the same names, with their help.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import Field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.config import EngineConfig, iter_options
from penstock.errors import InvalidRequestError, PenstockError
from penstock.request import RequestOutput
from penstock.sampling_params import SamplingParams, Structured
from penstock.server.config import ServerConfig, iter_server_options
from penstock.sources import CONFIG_VARIABLE, gather, show

if TYPE_CHECKING:
    from penstock.llm import LLM

SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy; default: the checkpoint's"),
    "top_k": (int, "keep only the k likeliest tokens; 0 keeps all"),
    "top_p": (float, "keep the likeliest tokens that make up this probability"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "typical_p": (float, "keep the tokens of most typical information that make up this probability"),
    "repetition_penalty": (float, "above 1 makes what was said, in prompt or answer, less likely"),
    "frequency_penalty": (float, "above 0 makes a token less likely each time that the answer has it"),
    "presence_penalty": (float, "above 0 makes tokens that the answer has less likely"),
    "max_tokens": (int, "end after this many tokens; default: as many as the context holds"),
    "n": (int, "answers to each prompt"),
    "best_of": (int, "draw this many answers, and show the n that are likeliest by the mean of their tokens"),
    "num_beams": (int, "beam search with this many beams; nothing is drawn"),
    "length_penalty": (float, "of beam search: the power of the length by which scores are divided; default 1"),
    "logprobs": (int, "with --json: log-probabilities of the chosen token and of this many others"),
}
SOURCES_HELP = "Each option is also a variable, PENSTOCK_PORT=8000, and an entry of the TOML file, port = 8000."
CHAT_HELP = "Type a message. /reset forgets the conversation, /exit or Ctrl-D ends."


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for a mistake of the caller's, 130 after Ctrl-C."""
    args = _make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Large language models: requests in, tokens out.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer prompts", description="Answer one prompt or many.")
    generate.add_argument("prompt", nargs="*", help="a prompt each; without any, standard input is one")
    generate.add_argument("--file", type=Path, help="take the prompt from this file")
    generate.add_argument("--lines", action="store_true", help="each line of the file or standard input is a prompt")
    generate.add_argument("--raw", action="store_true", help="give the prompt to the model without its chat template")
    generate.add_argument("--json", action="store_true", help="print a JSON object a prompt, one a line")
    _add_sampling_flags(generate)
    _add_engine_flags(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model", description=f"Talk to a model. {CHAT_HELP}")
    chat.add_argument("--system", help="the system message")
    _add_sampling_flags(chat)
    _add_engine_flags(chat)
    chat.set_defaults(run=_chat)

    serve = commands.add_parser(
        "serve", help="answer over HTTP", description="Serve a model over HTTP. " + SOURCES_HELP
    )
    _add_flags(serve.add_argument_group("server"), [f for _, f in iter_server_options()])
    _add_engine_flags(serve)
    serve.add_argument("--config", metavar="FILE", help=f"TOML file of options; default: ${CONFIG_VARIABLE}")
    serve.add_argument("--print-config", action="store_true", help="show every option and where it is from, and end")
    serve.set_defaults(run=_serve)

    verify = commands.add_parser(
        "verify",
        help="test that answers do not depend on their company",
        description="Answer a few requests alone, in company, in chunks, from the cache, preempted; compare token ids "
        "and log-probabilities bit for bit. The exit code is 1 if anything differs or a situation was not reached.",
    )
    _add_engine_flags(verify)
    verify.set_defaults(run=_verify)
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING_FLAGS.items():
        group.add_argument(_flag(name), type=kind, default=None, help=text, metavar=kind.__name__.upper())
    group.add_argument("--stop", action="append", default=[], help="end before this text; may be given several times")
    words = "a word that the answer must not have; may be given several times"
    group.add_argument("--bad-word", action="append", default=[], dest="bad_words", help=words)
    form = "answer with JSON that is valid by the JSON schema in this file"
    group.add_argument("--json-schema", type=Path, metavar="FILE", dest="structured", help=form)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser.add_argument_group("engine"), [f for _, f in iter_options()])


def _add_flags(group: "argparse._ArgumentGroup", options: "Iterable[Field[Any]]") -> None:
    """A flag for each option; what was not given stays absent, so that defaults live in one place."""
    for f in options:
        shared = {"dest": f.name, "default": argparse.SUPPRESS, "help": f.metadata["help"].replace("%", "%%")}
        if isinstance(f.default, bool):
            group.add_argument(_flag(f.name), action=argparse.BooleanOptionalAction, **shared)
        else:
            choices = f.metadata["choices"]
            metavar = "{" + ",".join(choices) + "}" if choices else f.name.upper()
            group.add_argument(_flag(f.name), metavar=metavar, **shared)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(args, f.name) for _, f in iter_options() if hasattr(args, f.name)}


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    form = None if args.structured is None else Structured.json_schema(_read_schema(args.structured))
    return SamplingParams(stop=args.stop, bad_words=args.bad_words, structured=form, **given)


def _read_schema(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the schema cannot be read: {error}") from None


def _open_llm(args: argparse.Namespace) -> "LLM":
    from penstock.llm import LLM

    llm = LLM(**_engine_options(args))
    print(llm.memory_plan, file=sys.stderr)
    return llm


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _generate(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    params = _sampling_params(args)
    with _open_llm(args) as llm:
        tokenizer = llm.tokenizer
        templated = not args.raw and tokenizer is not None and tokenizer.has_chat_template
        inputs = [llm.encode_chat([{"role": "user", "content": p}]) if templated else p for p in prompts]
        if len(inputs) == 1 and params.n == 1 and params.is_streamable and not args.json:
            return _print_stream(llm, inputs[0], params)
        outputs = llm.generate(inputs, params, progress=len(inputs) > 1)
        for prompt, output in zip(prompts, outputs, strict=True):
            if args.json:
                print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
            else:
                print("\n".join(answer.text for answer in output.outputs))
        return _exit_code(answer.error for output in outputs for answer in output.outputs)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt and (args.file or args.lines):
        raise InvalidRequestError("give prompts as arguments, or a file or standard input; not both")
    if args.prompt:
        return list(args.prompt)
    if args.file is None and sys.stdin.isatty():
        raise InvalidRequestError("no prompt: give one as an argument, with --file or on standard input")
    try:
        text = args.file.read_text() if args.file else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}") from None
    return [line for line in text.splitlines() if line.strip()] if args.lines else [text]


def _print_stream(llm: "LLM", prompt: str | list[int], params: SamplingParams) -> int:
    errors = []
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
        errors.append(delta.error)
    print()
    return _exit_code(errors)


def _exit_code(errors: Iterable[str | None]) -> int:
    """1, and the errors told, if any sequence ended with one."""
    told = [error for error in errors if error is not None]
    for error in told:
        print(f"penstock: error: {error}", file=sys.stderr)
    return 1 if told else 0


def _as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    answers = []
    for answer in output.outputs:
        shown: dict[str, Any] = {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if answer.logprobs is not None:
            shown["logprobs"] = [
                {"logprob": entry.logprob, "top": {token: _finite(value) for token, value in entry.top}}
                for entry in answer.logprobs
            ]
        if answer.score is not None:
            shown["score"] = answer.score
        if answer.error is not None:
            shown["error"] = answer.error
        answers.append(shown)
    return {
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": answers,
    }


def _finite(logprob: float) -> float | None:
    """None for an impossible token: JSON has no infinity."""
    return logprob if isfinite(logprob) else None


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chat(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    if params.n != 1:
        raise InvalidRequestError("a chat has one answer a turn: leave --n out", "n")
    params.check_streamable()
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with _open_llm(args) as llm:
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
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
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


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams) -> str:
    parts = []
    for delta in llm.stream(llm.encode_chat(messages), params):
        print(delta.text, end="", flush=True)
        parts.append(delta.text)
        if delta.error is not None:
            print(f"penstock: error: {delta.error}", file=sys.stderr)
    print()
    return "".join(parts)


# ── serve ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _serve(args: argparse.Namespace) -> int:
    groups = [("server", [f for _, f in iter_server_options()]), ("engine", [f for _, f in iter_options()])]
    options = [f for _, group in groups for f in group]
    flags = {f.name: getattr(args, f.name) for f in options if hasattr(args, f.name)}
    given = gather(options, flags, os.environ, args.config or os.environ.get(CONFIG_VARIABLE))
    server, engine = ({f.name: given[f.name].value for f in group if f.name in given} for _, group in groups)
    config, engine_config = ServerConfig.from_options(**server), EngineConfig.from_options(**engine)
    if args.print_config:
        print(show(groups, config.options() | engine_config.options(), given))
        return 0
    from penstock.server.serve import serve

    return serve(engine_config, config)


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _verify(args: argparse.Namespace) -> int:
    from penstock.verify import SelfTest

    test = SelfTest(**_engine_options(args))
    try:
        print(test.describe())
        findings = []
        for finding in test.findings():
            told = "same" if finding.clean else finding.difference or "NOT REACHED"
            print(f"{finding.situation:32} {finding.evidence:22} {told}", flush=True)
            findings.append(finding)
    finally:
        test.close()
    failed = sum(not finding.clean for finding in findings)
    print(f"{failed} of {len(findings)} situations failed" if failed else "every answer is the same, bit for bit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
