"""Writes the answers of `penstock generate`, each as soon as possible.

Text goes to standard output in the order of the prompts; JSON lines are written as the answers end, each with its
prompt's index. After Ctrl-C or a crash, a file of JSON lines tells which prompts are already answered.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol, TextIO

from penstock.api.request import RequestOutput, TokenLogprob
from penstock.errors import InvalidRequestError

HEADING_WIDTH = 70
"""Maximum characters of a prompt in the line above its answer."""


class AnswerWriter(Protocol):
    """Writes the answers of one command."""

    def write(self, index: int, output: RequestOutput) -> None:
        """Write the answers to the prompt of this index, or hold them back until earlier ones are written."""
        ...

    def finish(self) -> None:
        """Write the answers that were held back."""
        ...


class TextLines:
    """Writes texts in the order of the prompts; with `prompts`, each below a line with its prompt."""

    def __init__(self, file: TextIO, prompts: Sequence[str] | None = None) -> None:
        self._file = file
        self._prompts = prompts
        self._next = 0
        self._kept: dict[int, RequestOutput] = {}

    def write(self, index: int, output: RequestOutput) -> None:
        self._kept[index] = output
        while self._next in self._kept:
            self._print(self._next, self._kept.pop(self._next))
            self._next += 1

    def finish(self) -> None:
        for index in sorted(self._kept):
            self._print(index, self._kept.pop(index))

    def _print(self, index: int, output: RequestOutput) -> None:
        if self._prompts is not None:
            print(f"==> {shorten(self._prompts[index], HEADING_WIDTH, placeholder=' ...')} <==", file=self._file)
        print("\n".join(answer.text for answer in output.outputs), file=self._file, flush=True)


class JsonLines:
    """Writes one JSON object per prompt, in the order in which answers end."""

    def __init__(self, file: TextIO, prompts: Sequence[str]) -> None:
        self._file = file
        self._prompts = prompts

    def write(self, index: int, output: RequestOutput) -> None:
        entry = {"index": index} | _as_json(self._prompts[index], output)
        print(json.dumps(entry, ensure_ascii=False), file=self._file, flush=True)

    def finish(self) -> None:
        """Do nothing: `write` holds nothing back."""


@contextlib.contextmanager
def open_writer(prompts: Sequence[str], as_json: bool, path: Path | None) -> Iterator[AnswerWriter]:
    """A writer that appends to a file of JSON lines, or writes to standard output.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    if path is None:
        headings = prompts if len(prompts) > 1 and sys.stdout.isatty() else None
        yield JsonLines(sys.stdout, prompts) if as_json else TextLines(sys.stdout, headings)
        return
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"the output cannot be written: {error}", "output") from None
    with file:
        yield JsonLines(file, prompts)


def read_answered(path: Path, prompts: Sequence[str]) -> set[int]:
    """Indices of prompts with an answer without error in the file. Removes an incomplete last line from the file.

    Raises:
        InvalidRequestError: the file cannot be read, or is not a file of answers to these prompts.
    """
    try:
        with path.open("rb+") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            file.truncate(whole)  # a crash may leave half a line
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise InvalidRequestError(f"the output cannot be read: {error}", "output") from None
    answered = set()
    for number, line in enumerate(content[:whole].splitlines(), 1):
        index, has_error = _read_entry(line, prompts, f"{path}, line {number}")
        if not has_error:
            answered.add(index)
    return answered


def _read_entry(line: bytes, prompts: Sequence[str], place: str) -> tuple[int, bool]:
    """The index of a line's prompt, and whether one of its answers ended with an error."""
    try:
        entry = json.loads(line)
        index, prompt = entry["index"], entry["prompt"]
        has_error = any("error" in answer for answer in entry["outputs"])
    except (ValueError, TypeError, KeyError):
        raise InvalidRequestError(f"{place} is not an answer of this command: name another file", "output") from None
    if not isinstance(index, int) or not 0 <= index < len(prompts) or prompts[index] != prompt:
        raise InvalidRequestError(
            f"{place} answers another prompt than the one that has its index: give the same prompts, or another file",
            "output",
        )
    return index, has_error


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
                _token(entry.token_id, entry.text, entry.logprob)
                | {"top": [_token(*alternative) for alternative in _top(entry)]}
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


def _top(entry: TokenLogprob) -> list[tuple[int, str | None, float]]:
    texts = entry.top_texts or (None,) * len(entry.top)
    return [(token_id, text, logprob) for (token_id, logprob), text in zip(entry.top, texts, strict=True)]


def _token(token_id: int, text: str | None, logprob: float) -> dict[str, Any]:
    return {"token_id": token_id, "token": text, "logprob": _finite(logprob)}


def _finite(logprob: float) -> float | None:
    """The log-probability, or None for an impossible token: JSON has no infinity."""
    return logprob if isfinite(logprob) else None
