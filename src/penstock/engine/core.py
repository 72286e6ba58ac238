"""The engine core: scheduler and runner in one loop, driven by one thread.

    add_request(request) ──> schedule() ──> execute(plan) ──> update(result) ──> [SequenceOutput, ...]

Offline the caller's process drives it (`LLM`), online an engine process (`engine.process`).
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Protocol

from penstock.api.request import BlockSource, FinishReason, Request, Resumed, SequenceOutput
from penstock.config.settings import Settings
from penstock.core.build import make_scheduler
from penstock.core.plan import Runner, StepPlan, StepResult
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation
from penstock.dataclass import dataclass
from penstock.engine.adapters import AdapterRoom
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.errors import DeviceLostError, PenstockError
from penstock.kernels.block_bytes import BlockBytes
from penstock.runner.torch_device import is_device_lost
from penstock.structured.masks import Grammars

PAUSE = 0.02
"""Seconds that an engine without other work waits for a future before it checks for messages again."""


@dataclass(slots=True)
class _Pending:
    request: Request
    resumed: Resumed
    ordinal: int
    awaited: "Sequence[Future[Any]]"

    @property
    def error(self) -> BaseException | None:
        """Why the request cannot be served, if one of its futures failed."""
        return next((error for future in self.awaited if future.done() and (error := future.exception())), None)

    @property
    def is_settled(self) -> bool:
        return all(future.done() for future in self.awaited) or self.error is not None


class PendingRequests:
    """Requests that wait for futures (their grammar or their adapter) before they are added to the scheduler.

    They are numbered as they arrive, and keep that order in the scheduler's queue.
    """

    def __init__(
        self,
        awaited_by: "Callable[[Request], Sequence[Future[Any]]]",
        drop: "Callable[[Future[Any]], None]" = lambda _: None,
    ) -> None:
        """
        Args:
            awaited_by: starts and returns the futures a request waits for; empty if it can be scheduled now.
            drop: called with a future that no request waits for any more.
        """
        self._awaited_by = awaited_by
        self._drop = drop
        self._pending: dict[str, _Pending] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._pending)

    def requests(self, without: "Collection[Future[Any]]") -> Iterator[Request]:
        """The waiting requests, except those that wait for any of these futures."""
        for pending in self._pending.values():
            if not any(future in without for future in pending.awaited):
                yield pending.request

    def add_request(self, scheduler: Scheduler, request: Request, resumed: Resumed) -> None:
        """Add a request to the scheduler, now or when all its futures are done."""
        ordinal = self._num_arrived
        self._num_arrived += 1
        awaited = self._awaited_by(request)
        if not awaited:
            scheduler.add_request(request, resumed, ordinal)
        else:
            self._pending[request.request_id] = _Pending(request, resumed, ordinal, awaited)
            self.admit_ready(scheduler)

    def admit_ready(self, scheduler: Scheduler) -> None:
        """Add the requests that are ready to the scheduler; without other work, wait briefly for one."""
        if (
            self._pending
            and not scheduler.has_work
            and not any(pending.is_settled for pending in self._pending.values())
        ):
            open_futures = [
                future for pending in self._pending.values() for future in pending.awaited if not future.done()
            ]
            # Briefly: the engine's loop must look for messages, such as an abort, in between.
            wait(open_futures, PAUSE, FIRST_COMPLETED)
        for request_id, pending in list(self._pending.items()):
            if pending.is_settled:
                self.release(scheduler, request_id)
                if (error := pending.error) is not None:
                    reason = str(error) if isinstance(error, PenstockError) else f"it could not be prepared: {error}"
                    scheduler.finish_request(request_id, None, FinishReason.ERROR, reason)

    def release(self, scheduler: Scheduler, request_id: str, *, goes_on: bool = False) -> None:
        """Add a request to the scheduler, ready or not, so that it can be ended; unknown ids are ignored.

        Args:
            goes_on: whether other sequences of the request continue, and still need the awaited futures.
        """
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            # A grammar may take seconds to compile: cancel it if no other request waits for it.
            for future in () if goes_on else pending.awaited:
                if not future.done() and not any(future in other.awaited for other in self._pending.values()):
                    self._drop(future)
            scheduler.add_request(pending.request, pending.resumed, pending.ordinal)


logger = logging.getLogger(__name__)


class Closing(Protocol):
    """A component that frees memory."""

    def close(self) -> None: ...


class ModelRunner(Runner, Protocol):
    """A runner that owns a model."""

    @property
    def blocks(self) -> Sequence[BlockBytes] | None:
        """The KV cache's blocks by groups, as bytes; None: they cannot be read and written from outside."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


class EngineCore:
    """One model, one pool of KV blocks, and the requests that share them. Built by `engine.build`."""

    def __init__(
        self,
        info: EngineInfo,
        settings: Settings,
        scheduler: Scheduler,
        runner: ModelRunner,
        grammars: Grammars,
        pending: PendingRequests,
        clock: Callable[[], float] = time.monotonic,
        *,
        draft_runner: Closing | None = None,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """
        Args:
            clock: seconds; shared with the scheduler.
            draft_runner: used by the scheduler's drafters; closed with the engine.
            adapters: the adapter memory that `pending` waits for; None if requests cannot have adapters.
        """
        self.info = info
        self.settings = settings
        self._scheduler = scheduler
        self._tier = scheduler.tier
        self._runner = runner
        self._draft_runner = draft_runner
        self._grammars = grammars
        self._adapters = adapters
        self._pending = pending
        self._clock = clock
        self._num_steps = 0
        self._num_tokens = 0
        self._handovers: list[tuple[str, BlockSource | None]] = []
        self.last_step: StepRecord | None = None
        """Record of the latest step, if one was computed."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or len(self._pending) > 0

    def add_request(self, request: Request, resumed: Resumed = (), source: BlockSource | None = None) -> None:
        """Add a request built by `InputProcessor`, or resume one. The following steps return its outputs.

        Args:
            source: location of KV blocks of its text that another engine has computed.
        """
        # A request from the journal may have been accepted by an engine with more memory.
        if request.images and (refusal := self._scheduler.refusal(request)) is not None:
            self._scheduler.refuse(request, refusal)
            return
        if source is not None and self._tier is not None:
            self._tier.expect(request.request_id, source)
        self._pending.add_request(self._scheduler, request, resumed)

    def finish_request(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a request, or one of its sequences, in any state; ended and unknown ids are ignored."""
        # The scheduler knows how to end a request in any state, so one that still waits is added first.
        self._pending.release(self._scheduler, request_id, goes_on=index is not None)
        self._scheduler.finish_request(request_id, index, reason)
        if self._tier is not None and index is None:
            self._tier.ended(request_id)

    def expire(self, request_id: str) -> None:
        """End a request that has not run yet."""
        self._pending.release(self._scheduler, request_id)
        self._scheduler.expire(request_id)

    def hand_over(self, request_id: str) -> None:
        """Remove a request without an ending; `drain_handovers` returns its blocks' source once they are written."""
        text = self._scheduler.withdraw(request_id)
        if self._tier is None or text is None:
            self._handovers.append((request_id, None))
        else:
            self._tier.export(request_id, *text)

    def drain_handovers(self) -> list[tuple[str, BlockSource | None]]:
        """Requests that can now continue on another engine, each once."""
        handovers, self._handovers = self._handovers, []
        return handovers

    def step(self, begin: Callable[[int, Sequence[int]], None] | None = None) -> list[SequenceOutput]:
        """Compute one step. A step that fails ends its requests with `error`; the others continue.

        Raises:
            DeviceLostError: the device is lost, so the next step would fail, too; the engine is unusable.

        Args:
            begin: called before the computation with the step's number of tokens and its requests, as indices in the
                order of `add_request`.
        """
        began = self._clock()
        self.last_step = None
        if self._pending:
            self._make_room()
            self._pending.admit_ready(self._scheduler)
        if self._tier is not None:
            self.poll_transfers()
        plan = self._scheduler.schedule()
        if plan is None:
            outputs = self._scheduler.drain()
            if self._tier is not None and not outputs:
                self._tier.wait(PAUSE)
            return outputs
        if begin is not None:
            num_tokens = len(plan.forward.token_ids) + self._scheduler.trace.encoded_tokens
            # Written down before the device is touched: a step that kills the process names its requests.
            begin(num_tokens, self._scheduler.request_indices())
        self._num_steps += 1
        self._num_tokens += len(plan.forward.token_ids)
        scheduled = self._clock()
        try:
            result = self._execute(plan)
        except Exception as error:
            outputs = self._scheduler.fail_step(f"the step failed: {error}")
            if isinstance(error, DeviceLostError):
                raise
            # Asked of any error: torch raises a RuntimeError for a wrong shape and for a lost device alike.
            if is_device_lost(error):
                raise DeviceLostError(f"the device is lost: {error}") from error
            sizes = len(plan.forward.token_ids), len(plan.forward.encode)
            logger.exception("a step of %d tokens, and layers of %d images, failed", *sizes)
            return outputs
        executed = self._clock()
        outputs = self._scheduler.update(result)
        if self._tier is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self._tier.ended(output.request_id)
        times = (scheduled - began, executed - scheduled, self._clock() - executed)
        self.last_step = StepRecord(began, *times, self._scheduler.trace)
        return outputs

    def _make_room(self) -> None:
        """Load the adapters that requests wait for, as far as there is room."""
        if self._adapters is not None:
            self._adapters.make_room(self._adapters_in_use)

    def _adapters_in_use(self) -> set[str]:
        assert self._adapters is not None
        live = (*self._scheduler.requests(), *self._pending.requests(without=self._adapters.waiting))
        return {request.adapter.digest for request in live if request.adapter is not None}

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run the step, while a thread computes the masks of its grammars."""
        masks = self._grammars.begin(plan.samples) if plan.samples.has_grammars else None
        plan.samples.mask = masks
        result = self._runner.execute(plan)
        if masks is not None:
            # Where a grammar is complete, or failed, the mask is empty, and the sampler found no token.
            for sample, ending in masks.endings().items():
                result.end(sample, ending)
        return result

    @property
    def is_writing(self) -> bool:
        """Whether `poll_transfers` must be called regularly, even without work."""
        return self._tier is not None and self._tier.is_writing

    def poll_transfers(self) -> None:
        """Process completed writes and reads of blocks."""
        if self._tier is not None:
            self._tier.poll()
            self._handovers += self._tier.drain_exports()

    @property
    def is_loading(self) -> bool:
        """Whether a sequence waits for blocks from a file."""
        return self._tier is not None and self._tier.is_loading

    def stats(self) -> EngineStats:
        scheduler, kv = self._scheduler, self._scheduler.kv
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._pending),
            blocks_held=kv.pool.num_held,
            blocks_cached=kv.pool.num_idle,
            blocks_free=kv.pool.num_free,
            preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=kv.queried_tokens,
            prefix_hit_tokens=kv.hit_tokens,
            steps=self._num_steps,
            scheduled_tokens=self._num_tokens,
            drafted_tokens=scheduler.num_drafted,
            accepted_tokens=scheduler.num_accepted,
            encoded_images=0 if scheduler.images is None else scheduler.images.num_encoded,
            adapters_loaded=0 if self._adapters is None else self._adapters.num_loaded,
            tier=None if self._tier is None else replace(self._tier.stats),
        )

    def restart(self, settings: Settings, speculation: Speculation | None = None) -> None:
        """Reset to an empty cache with other scheduler limits, keeping model and arithmetic.

        For `penstock verify` and tests, which answer under many settings and load the weights once.

        `settings` may ask for at most the current number of blocks. Only the given speculation is used, and the block
        file no longer. There must be no unfinished work.
        """
        assert not self.has_work, "requests would be lost"
        assert settings.memory.num_blocks <= self.settings.memory.num_blocks, "there are no such blocks"
        assert settings.max_num_seqs <= self.settings.max_num_seqs, "there are no such slots"
        self._close_tier()
        images = self._scheduler.images
        self._scheduler = make_scheduler(settings, speculation, self._clock)
        if images is not None and self._scheduler.images is not None:
            self._scheduler.images.replace(images)

    def _close_tier(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    def check_integrity(self) -> None:
        """Assert the scheduler's and the cache's invariants; for tests and audits of a live engine."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Free the model's and the cache's memory."""
        self._close_tier()
        self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()
        self._runner.close()
        if self._draft_runner is not None:
            self._draft_runner.close()
