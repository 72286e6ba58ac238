"""From the journal back to requests: what was told of them before, and where they go on."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.engine.assembler import Assembler, CompletionDelta
from penstock.engine.journal import Entry, Record
from penstock.request import CompletionOutput, FinishReason, Request, SamplingParams, SequenceOutput
from penstock.tokenizer import Tokenizer


def entries_of(
    call: Sequence[tuple[Request, SamplingParams, str | None]], model: str, alias: str | None
) -> list[Entry]:
    """The requests of one new call, with their parameters as given and their prompts' texts, for the journal."""
    name, now = call[0][0].request_id, time.time()
    return [Entry(Record(*one, model), name, position, alias, now) for position, one in enumerate(call)]


def rebuild(entry: Entry, tokenizer: Tokenizer | None) -> Assembler:
    """An assembler that has been fed all that the journal holds, as if the request had arrived now."""
    assembler = _fresh(entry, tokenizer)
    for output in entry.outputs:
        assembler.feed(output, time.monotonic())
    return assembler


def catch_up(entry: Entry, assembler: Assembler, tokenizer: Tokenizer | None) -> list[CompletionDelta]:
    """All that a reader from the start on must be told to stand where the assembler does, a token each."""
    fresh, now = _fresh(entry, tokenizer), time.monotonic()
    outputs = (output for answer in assembler.result().outputs for output in _retell(assembler.request, answer))
    return [delta for delta in (fresh.feed(output, now) for output in outputs) if delta is not None]


def _fresh(entry: Entry, tokenizer: Tokenizer | None) -> Assembler:
    record = entry.record
    request = replace(record.request, arrival=time.monotonic())
    return Assembler(request, record.params, tokenizer, record.prompt)


def _retell(request: Request, answer: CompletionOutput) -> Iterator[SequenceOutput]:
    """What an engine may have said to make this answer, a token each."""
    reason = answer.finish_reason
    by_engine = reason
    if isinstance(answer.stop_reason, str):  # the text ended it, not the engine
        by_engine = FinishReason.LENGTH
    elif reason in (FinishReason.ABORT, FinishReason.ERROR):
        by_engine = None
    last = len(answer.token_ids) - 1
    for place, token in enumerate(answer.token_ids):
        logprobs = None if answer.logprobs is None else answer.logprobs[place : place + 1]
        ending = by_engine if place == last else None
        yield SequenceOutput(request.request_id, answer.index, [token], logprobs, ending)
    if reason is not None and (by_engine is None or last < 0):
        yield SequenceOutput(request.request_id, answer.index, [], finish_reason=reason, error=answer.error)
