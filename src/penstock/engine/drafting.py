"""Builds an engine's drafters and speculation controller from its settings."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config.engine_config import SpeculationConfig
from penstock.config.settings import Settings
from penstock.core.build import cache_groups
from penstock.core.kv_manager import KVManager
from penstock.core.plan import Runner
from penstock.core.speculation import Drafter, Speculation
from penstock.errors import ConfigError
from penstock.models.registry import read_facts
from penstock.structured.masks import Grammars

if TYPE_CHECKING:
    from penstock.runner.mtp_runner import MTPRunner


def open_draft_checkpoint(options: SpeculationConfig, target: Checkpoint) -> Checkpoint | None:
    """The draft model's checkpoint, if one is configured.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its tokens differ from the target's.
    """
    if options.speculative_model is None:
        return None
    draft = open_checkpoint(options.speculative_model)
    sizes = [read_facts(checkpoint).vocab_size for checkpoint in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"the draft model {draft.name} knows {sizes[1]} tokens, {target.name} {sizes[0]}: {_ADVICE}")
    names, draft_names = (_token_names(checkpoint) for checkpoint in (target, draft))
    if names != draft_names:
        token = min(token for token in names.keys() | draft_names.keys() if names.get(token) != draft_names.get(token))
        raise ConfigError(
            f"token {token} is {draft_names.get(token)!r} to the draft model {draft.name}, "
            f"and {names.get(token)!r} to {target.name}: {_ADVICE}"
        )
    return draft


_ADVICE = "a draft model must have the same vocabulary, as smaller models of one family do"


def _token_names(checkpoint: Checkpoint) -> dict[int, str]:
    from penstock.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(checkpoint.path))
    vocabulary = {} if tokenizer is None else tokenizer.backend.get_vocab()
    return {token: name for name, token in vocabulary.items()}


def make_drafters(settings: Settings, draft_runner: "Runner | MTPRunner | None", grammars: Grammars) -> list[Drafter]:
    """The configured drafters, preceded by the grammars' jump-ahead drafter.

    Args:
        draft_runner: runner of the draft model or of the model's MTP head, if configured.
    """
    if settings.speculation is None:
        return []
    # here: most engines have none
    from penstock.core.draft_model import DraftModel, MTPDrafter
    from penstock.core.ngrams import NgramDrafter
    from penstock.runner.mtp_runner import MTPRunner
    from penstock.structured.jump_ahead import JumpAhead

    if draft_runner is None:
        return [JumpAhead(grammars), NgramDrafter()]
    memory = settings.memory if settings.speculation.draft is None else settings.speculation.draft.memory
    kv = KVManager(cache_groups(memory), memory.block_size, settings.max_num_seqs)
    if isinstance(draft_runner, MTPRunner):
        return [JumpAhead(grammars), MTPDrafter(draft_runner, kv, settings.max_num_batched_tokens)]
    return [JumpAhead(grammars), DraftModel(draft_runner, kv, settings.max_num_batched_tokens)]


def make_speculation(settings: Settings, drafters: Sequence[Drafter], clock: Callable[[], float]) -> Speculation | None:
    """The controller of the number of drafts to verify; None without drafters."""
    if settings.speculation is None or not drafters:
        return None
    return Speculation(drafters, settings.speculation.num_tokens, clock)
