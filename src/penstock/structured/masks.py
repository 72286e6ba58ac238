"""Computes a step's grammar bitmasks in a thread while the forward pass runs.

    schedule() ──> Grammars.begin(samples) ──Masks──> execute(plan) ──> Masks.result()     in the sampler
                              │                            │
                              └── a thread: follow, mask ──┘

A sequence's matcher is a function of its tokens. It is kept from step to step, and rebuilt from them where it is
missing, as after preemption or in a new engine.
"""

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.api.sampling_params import Structured
from penstock.core.plan import Ending, SampleBatch
from penstock.core.turns import Turns
from penstock.structured.matcher import Matcher, set_tokens

if TYPE_CHECKING:
    from penstock.structured.grammar import Grammar
    from penstock.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

KEPT_GRAMMARS = 256
_ALL = np.uint32(0xFFFFFFFF)


class _LazyMatcher:
    """A sequence's matcher, created on first use."""

    def __init__(self, grammar: "Future[Grammar]") -> None:
        self._grammar = grammar
        self._matcher: Matcher | None = None

    @property
    def matcher(self) -> Matcher:
        """
        Raises:
            InvalidRequestError: the grammar cannot be compiled.
        """
        if self._matcher is None:
            self._matcher = Matcher(self._grammar.result())
        return self._matcher


class _Job(NamedTuple):
    """A row to mask."""

    lazy: _LazyMatcher
    history: "array[int]"
    prompt_len: int
    position: int
    stop_ids: tuple[int, ...]
    drafted: bool
    """Whether the preceding tokens are drafts that may be rejected."""


class Masks:
    """A `PendingMask`, and the rows that get no token."""

    def __init__(self, rows: list[int], jobs: list[_Job], vocab_size: int, thread: ThreadPoolExecutor) -> None:
        self.rows = rows
        self._vocab_size = vocab_size
        self._jobs = jobs
        self._endings: dict[int, Ending] = {}
        # All in one thread: no two masks may move the same matcher at a time.
        self._bits = thread.submit(self._compute)

    def result(self) -> NDArray[np.int32]:
        """[len(rows), vocab / 32 rounded up]: a bit a token, set where it is allowed."""
        return self._bits.result()

    def endings(self) -> dict[int, Ending]:
        """GRAMMAR_COMPLETE or GRAMMAR_FAILED for the samples that get no token."""
        self._bits.result()
        return self._endings

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._bits.done()

    def _compute(self) -> NDArray[np.int32]:
        bits = np.empty((len(self.rows), (self._vocab_size + 32) // 32), dtype=np.uint32)  # one for the end
        for row, job, line in zip(self.rows, self._jobs, bits, strict=True):
            try:
                ending = self._fill(job, line)
            except Exception:
                logger.exception("a grammar failed")
                ending = Ending.GRAMMAR_FAILED
            if ending is not None:
                self._endings[row] = ending
                line[:] = 0
        return bits.view(np.int32)[:, : (self._vocab_size + 31) // 32]

    def _fill(self, job: _Job, line: NDArray[np.uint32]) -> Ending | None:
        """Write a row's mask; returns the sequence's ending, if it ends here."""
        matcher = job.lazy.matcher
        if not matcher.follow(job.history[job.prompt_len : job.position]):
            if job.drafted:  # a forbidden guess: rows after it are rejected anyway
                line[:] = _ALL
                return None
            logger.warning("an answer left its grammar: %s", matcher.error)
            return Ending.GRAMMAR_FAILED
        may_end = matcher.allowed(line, self._vocab_size)
        if may_end and not line.any():
            return Ending.GRAMMAR_COMPLETE
        set_tokens(line, job.stop_ids, may_end)
        if not line.any():
            logger.warning("a grammar allows no token: %s", matcher.error)
            return Ending.GRAMMAR_FAILED
        return None


class Grammars:
    """The grammars of an engine's requests, and each sequence's matcher.

    All calls come from one thread, the engine's.
    """

    def __init__(self, load: "Callable[[], Vocabulary]", vocab_size: int, max_num_seqs: int) -> None:
        """
        Args:
            load: loads the vocabulary; called once, in a thread, for the first grammar.
            vocab_size: number of logits.
            max_num_seqs: maximum number of running sequences.
        """
        self._load = load
        self._vocab_size = vocab_size
        self._max_matchers = 2 * max_num_seqs
        self._vocabulary: Vocabulary | None = None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._grammars: OrderedDict[Structured, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting: Turns[tuple[Structured, Future[Grammar]]] = Turns()
        """To be compiled; guarded by the lock."""
        self._matchers: OrderedDict[int, _LazyMatcher] = OrderedDict()
        self._latest: Masks | None = None

    def compile(self, structured: Structured, tenant: str = "") -> "Future[Grammar]":
        """A future of the compiled grammar; fails with `InvalidRequestError` if it does not compile.

        Tenants take turns.
        """
        future = self._grammars.get(structured)
        if future is None or future.cancelled():
            future = self._grammars[structured] = Future()
            with self._lock:
                self._waiting.add(tenant, (structured, future))
            # Not this grammar but the next in turn: another tenant's may go first.
            self._compiler.submit(self._compile_next)
            # Only the table forgets it; requests that wait have the future.
            if len(self._grammars) > KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(structured)
        return future

    def drop(self, future: "Future[Any]") -> None:
        """Leave a grammar out that is not compiled yet and that no request waits for any more."""
        with self._lock:
            for waiting in self._waiting:
                if waiting[1] is future:
                    future.cancel()
                    self._waiting.remove(waiting)
                    break

    def _compile_next(self) -> None:
        with self._lock:
            waiting = self._waiting.take_first()
        # None: it was dropped after its turn had been submitted.
        if waiting is not None and waiting[1].set_running_or_notify_cancel():
            try:
                waiting[1].set_result(self._compile(waiting[0]))
            except Exception as error:
                waiting[1].set_exception(error)

    def _compile(self, structured: Structured) -> "Grammar":
        from penstock.structured.grammar import compile_grammar  # for the first grammar, like the vocabulary

        if self._vocabulary is None:
            self._vocabulary = self._load()
        return compile_grammar(self._vocabulary, structured)

    def begin(self, samples: SampleBatch) -> Masks:
        """Start computing the masks of the samples that have a grammar; at least one must have one.

        `samples` must not change before the masks are done.
        """
        forms = [seq.params.structured for seq in samples.sequences]
        rows = [row for row, form in enumerate(forms) if form is not None]
        assert rows, "no sample has a grammar"
        jobs, before = [], None
        for row in rows:
            seq = samples.sequences[row]
            jobs.append(
                _Job(
                    self._matcher(seq.sequence_id, forms[row]),
                    seq.tokens,
                    seq.prompt_len,
                    samples.positions[row],
                    seq.params.stop_token_ids,
                    drafted=seq.sequence_id == before,
                )
            )
            before = seq.sequence_id
        while len(self._matchers) > self._max_matchers:
            self._matchers.popitem(last=False)
        self._latest = Masks(rows, jobs, self._vocab_size, self._masker)
        return self._latest

    def _matcher(self, sequence_id: int, structured: Structured | None) -> _LazyMatcher:
        assert structured is not None
        lazy = self._matchers.get(sequence_id)
        if lazy is None:
            lazy = self._matchers[sequence_id] = _LazyMatcher(self.compile(structured))
        self._matchers.move_to_end(sequence_id)
        return lazy

    def forced(self, sequence_id: int, answer: "array[int]") -> list[int]:
        """Tokens that the sequence's grammar forces next; none before its first mask."""
        lazy = self._matchers.get(sequence_id)
        if lazy is None or not self._masker_is_idle() or not lazy.matcher.follow(answer):
            return []
        return lazy.matcher.forced()

    def _masker_is_idle(self) -> bool:
        """Whether matchers may be used outside the thread: it is busy between steps only if one failed."""
        return self._latest is not None and self._latest.done

    def forget_sequence(self, sequence_id: int) -> None:
        """Drop the matcher of a sequence that has ended."""
        self._matchers.pop(sequence_id, None)

    def close(self) -> None:
        """Stop the threads without waiting for running work."""
        with self._lock:
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._masker.shutdown(wait=False, cancel_futures=True)
