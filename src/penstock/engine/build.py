"""An engine's parts, made and put together from its options."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from penstock.checkpoint import Checkpoint, open_checkpoint
from penstock.config import EngineConfig, Settings, resolve
from penstock.core.build import make_scheduler
from penstock.engine.core import EngineCore, ModelRunner, PendingRequests
from penstock.engine.drafting import make_drafters, make_speculation, open_draft_checkpoint
from penstock.engine.fingerprint import arithmetic
from penstock.engine.info import EngineInfo
from penstock.memory import Machine, ModelFacts
from penstock.models.registry import read_facts
from penstock.request import Request
from penstock.runner.machine import detect_machine
from penstock.runner.ranks import start_runner
from penstock.structured.masks import Grammars
from penstock.structured.vocabulary import Vocabulary

MakeRunner = Callable[[Checkpoint, Settings], ModelRunner]


def build_engine(
    config: EngineConfig,
    *,
    make_runner: MakeRunner = start_runner,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """An engine, with its model loaded.

    Args:
        make_runner: makes what computes, of the model and of the draft model, if there is one.
        machine: what the memory plan reckons with; None: this one.
        clock: seconds, for everything in the engine that takes the time.

    Raises:
        ConfigError: the options, the checkpoint or the machine do not go together.
    """
    checkpoint = open_checkpoint(config.model.model)
    facts = read_facts(checkpoint, ranks=config.model.tensor_parallel_size)
    draft = open_draft_checkpoint(config.speculation, checkpoint)
    machine = machine or detect_machine(config.model.device)
    settings = resolve(config, facts, machine, None if draft is None else read_facts(draft))
    runner = make_runner(checkpoint, settings)
    draft_runner = None
    if draft is not None and settings.speculation is not None and settings.speculation.draft is not None:
        draft_runner = make_runner(draft, settings.speculation.draft)
    grammars = Grammars(
        lambda: Vocabulary.of_checkpoint(checkpoint.path, facts.vocab_size), facts.vocab_size, settings.max_num_seqs
    )
    speculation = make_speculation(settings, make_drafters(settings, draft_runner, grammars), clock)
    return EngineCore(
        _describe(checkpoint, facts, settings),
        settings,
        make_scheduler(settings, speculation, clock),
        runner,
        grammars,
        PendingRequests(lambda request: _awaited(request, grammars)),
        clock,
        draft_runner=draft_runner,
    )


def _awaited(request: Request, grammars: Grammars) -> list[Future[Any]]:
    """What must be ready before the scheduler takes a request."""
    structured = request.params.structured
    return [] if structured is None else [grammars.compile(structured)]


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
        max_num_batched_tokens=settings.max_num_batched_tokens,
        arithmetic=arithmetic(checkpoint.path, settings),
    )
