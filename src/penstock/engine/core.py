"""The engine: scheduler and runner in one loop, for one thread to drive.

    add(request) ──> schedule() ──> execute(plan) ──> update(result) ──> [SequenceOutput, ...]

Offline the caller's process drives it (`LLM`), online an engine process does (`engine.process`).
"""

import logging
import time
from collections.abc import Callable, Sequence

from penstock.checkpoint import Checkpoint, open_checkpoint
from penstock.config import EngineConfig, Settings, resolve
from penstock.core.fair_queue import QUEUE_POLICIES
from penstock.core.kv_manager import KVManager
from penstock.core.plan import StepPlan, StepResult
from penstock.core.policies import AdmissionPolicy, AdmitAll, TgiAdmission
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation
from penstock.engine.drafting import make_drafters, make_speculation, open_draft_checkpoint
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.engine.latecomers import Latecomers
from penstock.memory import ModelFacts
from penstock.models.registry import read_facts
from penstock.request import FinishReason, Request, Resumed, SequenceOutput
from penstock.runner.machine import detect_machine
from penstock.runner.torch_runner import TorchRunner
from penstock.structured.masks import Grammars
from penstock.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class EngineCore:
    """One model, one pool of KV blocks, and the requests that share them.

    Raises:
        ConfigError: the options, the checkpoint or the machine do not go together.
    """

    def __init__(self, config: EngineConfig) -> None:
        checkpoint = open_checkpoint(config.model.model)
        facts = read_facts(checkpoint)
        draft = open_draft_checkpoint(config.speculation, checkpoint)
        machine = detect_machine(config.model.device)
        self.settings = resolve(config, facts, machine, None if draft is None else read_facts(draft))
        self.info = _describe(checkpoint, facts, self.settings)
        self._runner = TorchRunner(checkpoint, self.settings)
        self._draft_runner = _load_draft(draft, self.settings)
        self._grammars = Grammars(
            lambda: Vocabulary.of_checkpoint(checkpoint.path, facts.vocab_size),
            facts.vocab_size,
            self.settings.max_num_seqs,
        )
        self._latecomers = Latecomers(self._grammars)
        drafters = make_drafters(self.settings, self._draft_runner, self._grammars)
        self._scheduler = make_scheduler(self.settings, make_speculation(self.settings, drafters))
        self._num_steps = 0
        self._num_tokens = 0
        self.last_step: StepRecord | None = None
        """What the latest call of `step` computed, if it did."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or len(self._latecomers) > 0

    def add(self, request: Request, resumed: Resumed = ()) -> None:
        """Accept a request that `Intake` has made, or go on with one. Its outputs come out of the steps that follow."""
        self._latecomers.add(self._scheduler, request, resumed)

    def finish(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a request, or one of its sequences, in any state; what has ended or was never known is left alone."""
        self._latecomers.release(self._scheduler, request_id)
        self._scheduler.finish(request_id, index, reason)

    def expire(self, request_id: str) -> None:
        """End a request if it has only waited so far."""
        self._latecomers.release(self._scheduler, request_id)
        self._scheduler.expire(request_id)

    def step(self, begin: Callable[[int, Sequence[int]], None] | None = None) -> list[SequenceOutput]:
        """Compute one step. A step that fails ends the requests in it with `error`; the others go on.

        Args:
            begin: called before the computing with how many tokens there are to compute, and whose: the requests by
                their places in the order of `add`.
        """
        began = time.monotonic()
        self.last_step = None
        if self._latecomers:
            self._latecomers.pass_on(self._scheduler)
        plan = self._scheduler.schedule()
        if plan is None:
            return self._scheduler.drain()
        if begin is not None:
            begin(len(plan.forward.token_ids), self._scheduler.under_way())
        self._num_steps += 1
        self._num_tokens += len(plan.forward.token_ids)
        scheduled = time.monotonic()
        try:
            result = self._execute(plan)
        except Exception as error:
            logger.exception("a step of %d tokens failed", len(plan.forward.token_ids))
            return self._scheduler.fail(f"the step failed: {error}")
        executed = time.monotonic()
        outputs = self._scheduler.update(result)
        times = (scheduled - began, executed - scheduled, time.monotonic() - executed)
        self.last_step = StepRecord(began, *times, self._scheduler.account)
        return outputs

    def _execute(self, plan: StepPlan) -> StepResult:
        """The runner's step, with the masks of grammars being computed beside it."""
        masks = self._grammars.begin(plan.samples)
        plan.samples.mask = masks
        result = self._runner.execute(plan)
        if masks is not None:
            for sample, ending in masks.endings().items():
                result.end(sample, ending)
        return result

    def stats(self) -> EngineStats:
        scheduler, kv = self._scheduler, self._scheduler.kv
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._latecomers),
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
        )

    def restart(self, settings: Settings, speculation: Speculation | None = None) -> None:
        """Begin anew with nothing cached, under other limits of the scheduler; model and arithmetic stay.

        `settings` may ask for fewer blocks than there are, not for more; of speculation only what is given is done. No
        work may be left. For self-tests.
        """
        assert not self.has_work, "requests would be lost"
        assert settings.memory.num_blocks <= self.settings.memory.num_blocks, "there are no such blocks"
        assert settings.max_num_seqs <= self.settings.max_num_seqs, "there are no such slots"
        self._scheduler = make_scheduler(settings, speculation)

    def check_integrity(self) -> None:
        """Assert the scheduler's and the cache's invariants; for tests and for audits of a live engine."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Give the model's and the cache's memory back."""
        self._grammars.close()
        self._runner.close()
        if self._draft_runner is not None:
            self._draft_runner.close()


def _load_draft(checkpoint: Checkpoint | None, settings: Settings) -> TorchRunner | None:
    if checkpoint is None or settings.speculation is None or settings.speculation.draft is None:
        return None
    return TorchRunner(checkpoint, settings.speculation.draft)


def make_scheduler(settings: Settings, speculation: Speculation | None = None) -> Scheduler:
    """The scheduler that the settings describe, without a runner."""
    memory = settings.memory
    return Scheduler(
        KVManager(
            memory.num_blocks,
            memory.block_size,
            settings.max_num_seqs,
            enable_prefix_caching=settings.enable_prefix_caching,
        ),
        QUEUE_POLICIES[settings.policy](),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        admission=_make_admission(settings),
        speculation=speculation,
    )


def _make_admission(settings: Settings) -> AdmissionPolicy:
    controls = settings.admission
    if controls is None:
        return AdmitAll()
    return TgiAdmission(
        block_size=settings.memory.block_size,
        max_batch_prefill_tokens=controls.max_batch_prefill_tokens,
        max_batch_total_tokens=controls.max_batch_total_tokens,
        waiting_served_ratio=controls.waiting_served_ratio,
        max_waiting_tokens=controls.max_waiting_tokens,
    )


def _describe(checkpoint: Checkpoint, facts: ModelFacts, settings: Settings) -> EngineInfo:
    return EngineInfo(
        model_name=settings.model_name,
        model_path=str(checkpoint.path),
        vocab_size=facts.vocab_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        seed=settings.seed,
        defaults=checkpoint.generation,
        memory_plan=settings.memory.describe(),
        num_blocks=settings.memory.num_blocks,
        block_size=settings.memory.block_size,
        max_batch_total_tokens=settings.admission.max_batch_total_tokens if settings.admission else None,
        device=settings.device,
    )
