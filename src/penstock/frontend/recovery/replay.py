"""Rebuilds requests from the journal: their outputs so far, and the point where they resume."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from penstock.api.request import CompletionOutput, FinishReason, PromptPart, Request, SequenceOutput
from penstock.api.sampling_params import SamplingParams
from penstock.errors import InvalidRequestError, JournalDamagedError
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry, Record
from penstock.text.tokenizer import Tokenizer

READINGS = 3
"""Maximum number of reads for a call whose requests end during the read."""


class RequestReplay:
    """Outputs of live and ended calls, for clients that reconnect; empty without a journal."""

    def __init__(
        self, journal: Journal | None, tokenizer: Tokenizer | None, live: Callable[[str], OutputProcessor | None]
    ) -> None:
        """
        Args:
            live: returns the output processor of a request that is in flight in this process, by its id.
        """
        self._journal = journal
        self._tokenizer = tokenizer
        self._live = live

    def unfinished(self, entries: Sequence[Entry] | None = None) -> list[tuple[Entry, OutputProcessor]]:
        """The unfinished requests in order of arrival, with their outputs so far. Called at startup.

        Args:
            entries: those of this model; None: all that the journal has.
        """
        if self._journal is None:
            return []
        entries = self._journal.unfinished() if entries is None else entries
        return [(entry, self._rebuild_unfinished(self._journal, entry)) for entry in entries]

    def _rebuild_unfinished(self, journal: Journal, entry: Entry) -> OutputProcessor:
        try:
            output_processor = rebuild(entry, self._tokenizer)
            if not output_processor.finished:
                return output_processor
            reason = "they end the request, which has not ended"
        except Exception as error:  # valid MessagePack, but not what an engine sends
            reason = f"they cannot be put together: {error!r}"
        # Computed again from the request alone, they are the same tokens.
        journal.set_aside_outputs(entry.record.request.request_id, reason)
        entry.outputs = []
        return rebuild(entry, self._tokenizer)

    async def look_up(self, name: str, tenant: str) -> list[tuple[Entry, OutputProcessor]]:
        """The requests of a tenant's call with their outputs so far, by one of the call's names; [] if unknown."""
        if self._journal is None:
            return []
        pairs: list[tuple[Entry, OutputProcessor | None]] = []
        for _ in range(READINGS):
            entries = [e for e in await self._journal.find(name) if e.record.request.tenant == tenant]
            pairs = [(entry, self._live(entry.record.request.request_id)) for entry in entries]
            # Either in flight here or ended on disk; neither means that it changed while the file was read.
            if all(live is not None or entry.ended is not None for entry, live in pairs):
                break
            # a request ended during the read and is in the journal now; or the engine was lost with all requests
        return [(entry, live or self._rebuild_ended(entry)) for entry, live in pairs]

    def _rebuild_ended(self, entry: Entry) -> OutputProcessor:
        try:
            return rebuild(entry, self._tokenizer)
        except Exception as error:
            request_id = entry.record.request.request_id
            raise JournalDamagedError(f"the journal's record of request {request_id} is damaged: {error!r}") from None

    async def catch_up_call(
        self, name: str, tenant: str, asked: Sequence[tuple[Request, SamplingParams]]
    ) -> tuple[list[OutputProcessor], list[tuple[int, CompletionDelta]]]:
        """A call's output processors, and the deltas that bring a new reader up to them.

        Args:
            asked: requests and parameters of the repeated call.

        Raises:
            InvalidRequestError: there is no such call, or its prompts, images or parameters differ.
        """
        call = await self.look_up(name, tenant)
        recorded = [(entry.record.request, entry.record.params) for entry, _ in call]
        if [(_content(request), params) for request, params in asked] != [
            (_content(request), params) for request, params in recorded
        ]:
            raise InvalidRequestError("Last-Event-ID names no known call with the same prompts and parameters")
        deltas = [
            (position, delta)
            for position, (entry, output_processor) in enumerate(call)
            for delta in catch_up(entry, output_processor, self._tokenizer)
        ]
        return [output_processor for _, output_processor in call], deltas


def _content(request: Request) -> tuple[tuple[int, ...], list[bytes]]:
    """A prompt's tokens, and the digests of its images; the journal may have them without pixels."""
    return request.prompt_token_ids, [image.digest for image in request.images]


def entries_of(
    call: Sequence[tuple[Request, SamplingParams, str | None]], model: str, alias: str | None
) -> list[Entry]:
    """Journal entries of a new call's requests, with parameters as given and the prompts' texts."""
    name, now = call[0][0].request_id, time.time()
    return [Entry(Record(*item, model), name, position, alias, now) for position, item in enumerate(call)]


def rebuild(entry: Entry, tokenizer: Tokenizer | None) -> OutputProcessor:
    """An output processor with all outputs in the journal, as if the request had just arrived."""
    output_processor = _fresh(entry, tokenizer)
    for output in entry.outputs:
        output_processor.process_output(output, time.monotonic())
    return output_processor


def catch_up(entry: Entry, output_processor: OutputProcessor, tokenizer: Tokenizer | None) -> list[CompletionDelta]:
    """Deltas, one per token, that bring a new reader up to the output processor's position."""
    fresh, now = _fresh(entry, tokenizer), time.monotonic()
    result = output_processor.result()
    outputs = [output for answer in result.outputs for output in _retell(output_processor.request, answer)]
    prompt = [entry for entry in result.prompt_logprobs or () if entry is not None]
    if prompt:
        outputs.insert(0, SequenceOutput(result.request_id, 0, [], prompt=PromptPart(1, prompt)))
    return [delta for delta in (fresh.process_output(output, now) for output in outputs) if delta is not None]


def _fresh(entry: Entry, tokenizer: Tokenizer | None) -> OutputProcessor:
    record = entry.record
    request = replace(record.request, arrival=time.monotonic())
    return OutputProcessor(request, record.params, tokenizer, record.prompt)


def _retell(request: Request, answer: CompletionOutput) -> Iterator[SequenceOutput]:
    """Engine outputs, one per token, that reproduce this answer."""
    reason = answer.finish_reason
    by_engine = reason
    if isinstance(answer.stop_reason, str):  # a stop string ended it, not the engine
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
