"""`penstock generate`: answers to prompts from arguments, a file or standard input."""

import argparse
import json
import sys
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.flags import add_engine_flags, add_sampling_flags, only_adapter, open_llm, sampling_params
from penstock.errors import InvalidRequestError
from penstock.request import RequestOutput
from penstock.sampling_params import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("generate", help="answer prompts", description="Answer one or more prompts.")
    parser.add_argument("prompt", nargs="*", help="one or more prompts; default: standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from this file")
    parser.add_argument("--lines", action="store_true", help="each line of the file or standard input is a prompt")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, one per line")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    params, adapter = sampling_params(args), only_adapter(args)
    if params.logprobs is not None and not args.json:
        raise InvalidRequestError(
            "--logprobs are printed as JSON only: add --json, or leave --logprobs out", "logprobs"
        )
    with open_llm(args) as llm:
        tokenizer = llm.tokenizer
        templated = not args.raw and tokenizer is not None and tokenizer.has_chat_template
        inputs = [llm.encode_chat([{"role": "user", "content": p}]) if templated else p for p in prompts]
        if len(inputs) == 1 and params.n == 1 and params.is_streamable and not args.json:
            return _print_stream(llm, inputs[0], params, adapter)
        outputs = llm.generate(inputs, params, progress=len(inputs) > 1, adapter=adapter)
        for prompt, output in zip(prompts, outputs, strict=True):
            if args.json:
                print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
            else:
                print("\n".join(answer.text for answer in output.outputs))
        return _exit_code(answer.error for output in outputs for answer in output.outputs)


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
    for delta in llm.stream(prompt, params, adapter=adapter):
        print(delta.text, end="", flush=True)
        errors.append(delta.error)
    print()
    return _exit_code(errors)


def _exit_code(errors: Iterable[str | None]) -> int:
    """Print the errors of sequences; the exit code, 1 if there are any."""
    found = [error for error in errors if error is not None]
    for error in found:
        print(f"penstock: error: {error}", file=sys.stderr)
    return 1 if found else 0


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
