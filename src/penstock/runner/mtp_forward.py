"""A multi-token prediction head's forward pass over a step: eager, or recorded once as native programs.

Both read the hidden states before the step's tokens from the rows of `HiddenStates`, and write the head's own there.
"""

import logging
from collections.abc import Sequence
from typing import Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.array_types import A, A_co
from penstock.kernels.batch import Batch, RecordedBatch
from penstock.kernels.cache import AnyCache
from penstock.kernels.ops import Ops
from penstock.models.mtp import MTPHead
from penstock.native import Library
from penstock.native.array import INT64, Array, CannotRecordError
from penstock.native.program import Program, memory_of
from penstock.runner.hidden_states import HiddenStates

log = logging.getLogger(__name__)

Rows = NDArray[np.int64]


class MTPForward(Protocol[A_co]):
    """A head over its cache."""

    def run(self, batch: Batch, before: Rows, sampled: Sequence[int]) -> A_co | None:
        """Compute a step's tokens, and store their keys and values, and the hidden states of the sampled tokens.

        Returns the logits [len(sampled), vocab_size] float32 of the tokens `sampled`; None if there are none. The next
        call may overwrite them.

        Args:
            before: for each token, the row of the hidden state before it.
        """
        ...


def make_mtp_forward(
    head: MTPHead,
    cache: AnyCache | None,
    hidden: HiddenStates,
    ops: Ops,
    *,
    max_tokens: int,
    max_rows: int,
) -> MTPForward:
    """Record the head for steps of up to `max_tokens` tokens and `max_rows` samples, if possible; as `make_forward`."""
    if ops.library is not None:
        try:
            return RecordedMTP(head, cache, hidden, ops, ops.library, max_tokens, max_rows)
        except CannotRecordError as error:
            log.warning("the MTP head runs eagerly, more slowly, as no recorded step has %s", error)
    return EagerMTP(head, cache, hidden, ops)


class EagerMTP(Generic[A]):
    """Runs the head's code in each step. See `MTPForward`."""

    def __init__(self, head: MTPHead[A], cache: AnyCache[A] | None, hidden: HiddenStates[A], ops: Ops[A]) -> None:
        self._head, self._cache, self._hidden, self._ops = head, cache, hidden, ops

    def run(self, batch: Batch, before: Rows, sampled: Sequence[int]) -> A | None:
        head, ops, table = self._head, self._ops, self._hidden.rows
        head.positions.prepare(batch.positions)
        hidden = ops.gather(table, ops.from_host(before, table))
        token_ids, positions = (
            ops.from_host(column.astype(np.int64), table) for column in (batch.token_ids, batch.positions)
        )
        mixed = head.mix_tokens(token_ids, positions, hidden, batch, self._cache)
        if not sampled:
            return None
        normed = head.finish(mixed, ops.from_host(np.array(sampled, np.int64), table))
        ops.scatter(normed, ops.from_host(_own_rows(self._hidden, len(sampled)), table), table)
        return head.logits(normed)


class RecordedMTP:
    """Replays native calls recorded from one run of the head's code. See `MTPForward`.

    Raises:
        CannotRecordError: the head uses an operation that the library lacks.
    """

    def __init__(
        self,
        head: MTPHead[Array],
        cache: AnyCache[Array] | None,
        hidden: HiddenStates[Array],
        ops: Ops[Array],
        library: Library,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._head, self._hidden, self._library = head, hidden, library
        self._tokens, self._samples, self._batch = Program(max_tokens), Program(max_rows), RecordedBatch()
        self._token_ids, self._positions, self._before = (self._tokens.array((), INT64) for _ in range(3))
        taken = ops.gather(hidden.rows, self._before)
        mixed = head.mix_tokens(self._token_ids, self._positions, taken, self._batch, cache)
        self._mixed = (memory_of(mixed[0]), memory_of(mixed[1]))
        self._sampled, self._own = (self._samples.array((), INT64) for _ in range(2))
        normed = head.finish(self._mixed, self._sampled)
        ops.scatter(normed, self._own, hidden.rows)
        self._logits = memory_of(head.logits(normed))

    def run(self, batch: Batch, before: Rows, sampled: Sequence[int]) -> Array | None:
        self._head.positions.prepare(batch.positions)
        self._token_ids.fill(batch.token_ids, batch.num_tokens)
        self._positions.fill(batch.positions, batch.num_tokens)
        self._before.fill(before, batch.num_tokens)
        self._batch.become(batch)
        tokens, count = self._tokens.segment(batch.num_tokens), len(sampled)
        if not sampled:
            self._library.run(tokens)
            return None
        self._sampled.fill(sampled, count)
        self._own.fill(_own_rows(self._hidden, count), count)
        self._library.run(tokens, self._samples.segment(count))
        return self._logits[:count]


def _own_rows(hidden: HiddenStates, count: int) -> Rows:
    return np.arange(hidden.own_row(0), hidden.own_row(count))
