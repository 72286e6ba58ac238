"""Applies a step's result: each sequence's new tokens, and endings.

A sequence ends by one of its tokens, its length, a failure of its row, or a call (`finish_request`).
"""

import itertools
import math
from collections.abc import Iterable

from penstock.api.request import ErrorReason, FinishReason, PromptPart, Request, SequenceOutput, TokenLogprob
from penstock.core.beam import BeamSearch
from penstock.core.kv_manager import KVManager
from penstock.core.plan import Ending, StepResult
from penstock.core.sequence import Sequence, Status
from penstock.core.sequence_table import SequenceTable
from penstock.core.speculation import Speculation
from penstock.core.step import Step

NOT_FINITE = "the model's logits were not finite numbers"
BROKEN_IMAGE = "the features of an image, or of a sound, in this request are not finite numbers: send another one"
FAILURES = {
    Ending.NOT_FINITE: NOT_FINITE,
    Ending.NO_TOKEN_LEFT: "no token is allowed here: relax allowed_token_ids, bad_words, bad_token_ids or min_tokens",
    Ending.GRAMMAR_FAILED: "the grammar of the structured answer became too complex or allows no token here: simplify "
    "the schema or grammar",
}
FAILURE_REASONS = {
    Ending.NO_TOKEN_LEFT: ErrorReason.NO_TOKEN_ALLOWED,
    Ending.GRAMMAR_FAILED: ErrorReason.NO_TOKEN_ALLOWED,
}


class StepUpdate:
    """Applies step results: appends sampled tokens, commits full blocks, and ends finished sequences."""

    def __init__(
        self, kv: KVManager, sequences: SequenceTable, speculation: Speculation | None, overflow_advice: str = ""
    ) -> None:
        """
        Args:
            overflow_advice: what helps where the model's logits are not finite, for errors.
        """
        self._failures = FAILURES | {Ending.NOT_FINITE: NOT_FINITE + overflow_advice}
        self._kv = kv
        self._sequences = sequences
        self._speculation = speculation
        self._ended: list[SequenceOutput] = []  # endings that no step produced
        self._searches: dict[str, BeamSearch] = {}  # searches with new candidates from the current step

    @property
    def num_unsent(self) -> int:
        """Endings that no step produced and `drain` has not returned."""
        return len(self._ended)

    def finish_request(
        self,
        request_id: str,
        index: int | None,
        reason: FinishReason,
        error: str | None = None,
        error_reason: ErrorReason | None = None,
    ) -> None:
        """See `Scheduler.finish_request`."""
        for seq in self._sequences.of(request_id):
            if index is None or seq.index == index or seq.beams is not None:
                self._end(seq)
                # Of `best_of` and beam search, callers know the first n sequences alone.
                if seq.index < seq.request.params.n:
                    ending = SequenceOutput(request_id, seq.index, [], finish_reason=reason, error=error)
                    ending.error_reason = error_reason
                    self._ended.append(ending)

    def refuse(self, request: Request, error: str, error_reason: ErrorReason) -> None:
        """End a request that was not added."""
        for index in range(request.params.n):
            ending = SequenceOutput(request.request_id, index, [], finish_reason=FinishReason.ERROR, error=error)
            ending.error_reason = error_reason
            self._ended.append(ending)

    def withdraw(self, request_id: str) -> None:
        """Remove a request without an ending: it continues on another engine."""
        for seq in self._sequences.of(request_id):
            self._end(seq)

    def drain(self) -> list[SequenceOutput]:
        """Endings that no step produced, each once."""
        ended, self._ended = self._ended, []
        return ended

    def apply_result(self, step: Step, result: StepResult) -> tuple[list[SequenceOutput], list[Sequence]]:
        """The outputs of a step, and the sequence of each new token."""
        for digest in result.broken_images:
            self._end_with_image(digest)
        self._advance(step)  # before tokens are appended: a sequence that lacks none now has its prompt computed
        outputs = self.drain()
        if step.num_prompt_logprobs:
            self._pass_on_prompt_logprobs(step, result.prompt_logprobs, outputs)
        if step.trace.num_drafted:
            served = self._apply_drafted(step, result, outputs)
        else:
            served = step.sampled
            logprobs: Iterable[TokenLogprob | None] = result.logprobs or itertools.repeat(None, len(served))
            for sample, (seq, token, logprob) in enumerate(zip(served, result.token_ids, logprobs, strict=True)):
                entries = None if logprob is None else [logprob]
                if token is None:
                    self._take(seq, [], entries, outputs, result.endings[sample])
                else:
                    self._take(seq, [token], entries, outputs)
        # After all rows: a search compares the candidates of all its beams.
        if self._searches:
            self._advance_searches(outputs)
        return outputs, served

    def _advance(self, step: Step) -> None:
        """Commit computed tokens: full blocks enter the prefix cache, siblings of completed prompts start."""
        size = self._kv.block_size
        for seq, count in zip(step.sequences, step.query_lens, strict=True):
            if seq.num_drafts:
                continue  # its drafts are verified later
            if seq.status is Status.FINISHED:
                continue  # it ended with a broken image
            seq.num_computed += count
            seq.num_returned = 0
            if seq.num_computed >= (seq.num_committed + 1) * size:
                self._kv.commit(seq)
            if seq.siblings and seq.num_computed == len(seq.tokens) and seq.beams is None:
                self._sequences.fork(seq)

    def _apply_drafted(self, step: Step, result: StepResult, outputs: list[SequenceOutput]) -> list[Sequence]:
        """Add the new tokens of a step with drafts; returns the sequence of each.

        A sequence's new tokens are its samples up to the first that differs from its draft, inclusive.
        """
        served: list[Sequence] = []
        index, sampled = 0, step.sampled
        while index < len(sampled):
            seq = sampled[index]
            end = kept = index + 1
            if seq.num_drafts and seq.status is not Status.FINISHED:
                end += seq.num_drafts
                kept += self._verify_drafts(seq, result.token_ids[index:end])
                step.trace.num_accepted += kept - index - 1
            entries = result.logprobs[index:kept] if result.logprobs is not None else []
            logprobs = [entry for entry in entries if entry is not None]
            tokens = [token for token in result.token_ids[index:kept] if token is not None]
            served += [seq] * self._take(seq, tokens, logprobs or None, outputs, result.endings.get(kept - 1))
            index = end
        return served

    def _verify_drafts(self, seq: Sequence, sampled: list[int | None]) -> int:
        """Number of a sequence's drafts that equal the samples; removes all drafts from the tokens."""
        tokens = seq.tokens
        num_drafts = seq.num_drafts
        known, right = len(tokens) - num_drafts, 0
        while right < num_drafts and tokens[known + right] == sampled[right]:
            right += 1
        del tokens[known + right :]  # the keys of rejected drafts are overwritten by the tokens in their place
        seq.num_drafts = 0
        self._kv.end_drafts(seq, right, num_drafts)  # with the accepted ones, whose keys may enter the prefix cache
        del tokens[known:]  # `_append` adds them again, up to one that ends the sequence
        return right

    def _pass_on_prompt_logprobs(self, step: Step, logprobs: list[TokenLogprob], outputs: list[SequenceOutput]) -> None:
        """Report prompt log-probabilities, and end the requests that request nothing else."""
        index = 0
        for seq, count in step.num_prompt_logprobs:
            part = PromptPart(seq.num_prompt_logprobs + 1, logprobs[index : index + count])
            index += count
            if seq.status is Status.FINISHED:
                continue
            seq.num_prompt_logprobs += count
            if any(math.isnan(entry.logprob) for entry in part.logprobs):
                self.finish_request(seq.request_id, None, FinishReason.ERROR, self._failures[Ending.NOT_FINITE])
            else:
                outputs.append(self._report(seq, SequenceOutput(seq.request_id, seq.index, [], prompt=part)))
                if seq.has_prompt_logprobs and not seq.request.params.max_tokens:
                    self.finish_request(seq.request_id, None, FinishReason.LENGTH)
        outputs += self.drain()

    def _end_with_image(self, digest: bytes) -> None:
        """End the requests with an image whose features are not finite, before keys that depend on it are committed."""
        for request in list(self._sequences.requests()):
            if any(image.digest == digest for image in request.images):
                self.finish_request(
                    request.request_id, None, FinishReason.ERROR, BROKEN_IMAGE, ErrorReason.IMAGE_NOT_ENCODED
                )

    def _report(self, seq: Sequence, output: SequenceOutput) -> SequenceOutput:
        """Add metadata on the sequence's start to its first output."""
        if not seq.reported:
            seq.reported = True
            output.first_scheduled = seq.first_scheduled
            output.num_cached_tokens = seq.num_cached_tokens
        return output

    def _take(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        outputs: list[SequenceOutput],
        ending: Ending | None = None,
    ) -> int:
        """Add a sequence's new tokens, or a beam's candidates; returns the number of tokens it continues with."""
        if seq.status is Status.FINISHED:  # it ended in this step for another reason
            return 0
        if seq.beams is None:
            outputs.append(self._append(seq, token_ids, logprobs, ending))
            return len(outputs[-1].token_ids)
        if ending is not None:
            reason = FAILURE_REASONS.get(ending)
            self.finish_request(seq.request_id, None, FinishReason.ERROR, self._failures[ending], reason)
            outputs += self.drain()
            return 0
        assert logprobs is not None, "a beam asks for its candidates"
        seq.beams.collect(seq.index, logprobs[0])
        self._searches[seq.request_id] = seq.beams
        return 1

    def _advance_searches(self, outputs: list[SequenceOutput]) -> None:
        """Advance the beam searches with new candidates."""
        searches, self._searches = self._searches, {}
        for request_id, search in searches.items():
            sequences = self._sequences.of(request_id)
            if not search.is_complete:
                # Beams that wait for others release their blocks (whose keys may stay in the prefix cache): so a search
                # never needs more blocks than its longest beam.
                self._sequences.park(seq for seq in sequences if search.has_candidates(seq.index))
            elif branches := search.advance():
                self._sequences.rearrange(sequences, branches)
                outputs.append(self._report(sequences[0], SequenceOutput(request_id, 0, [])))
            else:
                ended = search.outputs(request_id)
                self._report(sequences[0], ended[0])
                outputs += ended
                for seq in sequences:
                    self._end(seq)

    def _append(
        self, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprob] | None, ending: Ending | None
    ) -> SequenceOutput:
        """Add a sequence's new tokens, up to one that ends it; `ending`: why none comes after them."""
        output = self._report(seq, SequenceOutput(seq.request_id, seq.index, token_ids, logprobs))
        tokens, before = seq.tokens, len(seq.tokens)
        for token in token_ids:
            tokens.append(token)
            if token in seq.stop_ids and len(tokens) > seq.min_length:
                output.finish_reason = FinishReason.STOP
                break
            if len(tokens) >= seq.max_length:
                output.finish_reason = FinishReason.LENGTH
                break
        else:  # no token ended it
            if ending is not None:
                output.finish_reason = FinishReason.ERROR if ending in FAILURES else FinishReason.STOP
                output.error, output.error_reason = self._failures.get(ending), FAILURE_REASONS.get(ending)
        if output.finish_reason is not None:
            added = len(tokens) - before
            output.token_ids = token_ids[:added]
            output.logprobs = logprobs and logprobs[:added]
            self._end(seq)
        return output

    def _end(self, seq: Sequence) -> None:
        self._sequences.end_sequence(seq)
        if self._speculation is not None:
            self._speculation.forget_sequence(seq)
