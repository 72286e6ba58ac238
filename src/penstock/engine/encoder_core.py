"""Engine core for embedding models and rerankers: texts in, vectors out; each step computes a batch of whole texts.

It has the interface of `EngineCore`: `LLM` drives it offline, the engine process online.
"""

import logging
import time
from collections.abc import Callable, Sequence

from penstock.api.request import BlockSource, FinishReason, Request, Resumed, SequenceOutput
from penstock.config.settings import Settings
from penstock.core.encoder import EncoderScheduler, VectorRunner
from penstock.core.fairness import QUEUE_POLICIES
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.errors import DeviceLostError
from penstock.runner.torch_device import is_device_lost

logger = logging.getLogger(__name__)


class EncoderCore:
    """One encoder, and the texts that share its steps. Built by `engine.build`."""

    def __init__(
        self,
        info: EngineInfo,
        settings: Settings,
        runner: VectorRunner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.settings = settings
        self._runner = runner
        self._clock = clock
        self._scheduler = EncoderScheduler(
            QUEUE_POLICIES[settings.policy](),
            budget=settings.max_num_batched_tokens,
            block_size=settings.memory.block_size,
            max_num_seqs=settings.max_num_seqs,
            clock=clock,
            overflow_advice=settings.overflow_advice,
        )
        self._handovers: list[tuple[str, BlockSource | None]] = []
        self._num_steps = 0
        self._num_tokens = 0
        self.last_step: StepRecord | None = None
        """Record of the latest step, if it computed anything."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def is_loading(self) -> bool:
        """Always False: texts load no blocks."""
        return False

    @property
    def is_writing(self) -> bool:
        """Always False: nothing outlives a step."""
        return False

    def poll_transfers(self) -> None:
        """Do nothing: there are no background writes."""

    def add_request(self, request: Request, resumed: Resumed = (), source: BlockSource | None = None) -> None:
        """Add a text; a resumed one starts from the beginning."""
        self._scheduler.add_request(request)

    def finish_request(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a waiting text; ended and unknown ids are ignored."""
        self._scheduler.finish_request(request_id, reason)

    def hand_over(self, request_id: str) -> None:
        """Remove a text without an ending: another engine computes all of it."""
        self._scheduler.withdraw(request_id)
        self._handovers.append((request_id, None))

    def drain_handovers(self) -> list[tuple[str, BlockSource | None]]:
        """Texts that can now move to another engine, each once."""
        handovers, self._handovers = self._handovers, []
        return handovers

    def expire(self, request_id: str) -> None:
        """End a text that has not run, as is the case for all texts between steps."""
        self._scheduler.expire(request_id)

    def step(self, begin: Callable[[int, Sequence[int]], None] | None = None) -> list[SequenceOutput]:
        """Compute one step. A step that fails ends its texts with `error`; others continue. See `EngineCore.step`."""
        began = self._clock()
        self.last_step = None
        plan = self._scheduler.schedule()
        if plan is None:
            return self._scheduler.drain()
        num_tokens = len(plan.token_ids)
        if begin is not None:
            begin(num_tokens, self._scheduler.request_indices())
        self._num_steps += 1
        self._num_tokens += num_tokens
        scheduled = self._clock()
        try:
            vectors = self._runner.execute(plan)
        except Exception as error:
            outputs = self._scheduler.fail_step(f"the step failed: {error}")
            if is_device_lost(error):
                raise DeviceLostError(f"the device is lost: {error}") from error
            logger.exception("a step of %d tokens failed", num_tokens)
            return outputs
        executed = self._clock()
        outputs = self._scheduler.update(vectors)
        times = (scheduled - began, executed - scheduled, self._clock() - executed)
        self.last_step = StepRecord(began, *times, self._scheduler.trace)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            blocks_held=0,
            blocks_cached=0,
            blocks_free=self.info.num_blocks,
            preemptions=0,
            prefix_queried_tokens=0,
            prefix_hit_tokens=0,
            steps=self._num_steps,
            scheduled_tokens=self._num_tokens,
        )

    def close(self) -> None:
        """Free the model's memory."""
        self._runner.close()
