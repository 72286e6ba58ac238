"""Who guesses for an engine, and which models may guess for which."""

import json
import re
import time
from array import array
from pathlib import Path

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.core.ngrams import NgramDrafter
from penstock.engine.build import build_engine
from penstock.engine.drafting import make_drafters, make_speculation, open_draft_checkpoint
from penstock.errors import CheckpointError, ConfigError
from penstock.structured.jump_ahead import JumpAhead
from penstock.structured.masks import Grammars
from penstock.structured.vocabulary import Vocabulary
from tests.support.checkpoints import write_tiny_llama
from tests.support.stepping import plan_of, settings_for


def draft_for(target: Path, draft: Path | None) -> object:
    options = EngineConfig.from_options(speculative_model=None if draft is None else str(draft))
    return open_draft_checkpoint(options.speculation, open_checkpoint(str(target)))


def test_a_model_with_the_same_tokens_may_guess(tiny_llama: Path, tmp_path: Path) -> None:
    assert draft_for(tiny_llama, None) is None
    assert draft_for(tiny_llama, write_tiny_llama(tmp_path, num_hidden_layers=1, hidden_size=32)) is not None


def test_one_with_more_tokens_other_tokens_or_none_may_not(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knows 400 tokens, tiny-llama0 384: a draft model must have the same"):
        draft_for(tiny_llama, write_tiny_llama(tmp_path / "larger", vocab_size=400))
    folder = write_tiny_llama(tmp_path / "renamed")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["Z"], vocabulary["Y"] = vocabulary["Y"], vocabulary["Z"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"token {vocabulary['Z']} is 'Z' to the draft model renamed, and 'Y' to"):
        draft_for(tiny_llama, folder)
    with pytest.raises(CheckpointError, match="there is no folder"):
        draft_for(tiny_llama, tmp_path / "nowhere")


def test_settings_make_the_drafters(tiny_llama: Path) -> None:
    _, plain = settings_for(tiny_llama)
    grammars = Grammars(lambda: Vocabulary.of_checkpoint(tiny_llama, 384), 384, max_num_seqs=1)
    assert make_drafters(plain, None, grammars) == []
    assert make_speculation(plain, [], time.monotonic) is None
    _, guessing = settings_for(tiny_llama, speculation="ngram", num_speculative_tokens=3)
    forced, drafter = make_drafters(guessing, None, grammars)
    assert isinstance(forced, JumpAhead)
    assert isinstance(drafter, NgramDrafter)
    speculation = make_speculation(guessing, [drafter], time.monotonic)
    assert speculation is not None
    assert speculation.num_drafts == 3


def test_an_engine_with_a_draft_model_tells_both_plans_and_gives_both_back(tiny_llama: Path) -> None:
    config = EngineConfig.from_options(
        model=str(tiny_llama), speculative_model=str(tiny_llama), kv_cache_memory="4MiB", threads=1
    )
    core = build_engine(config)
    assert re.search(r"draft model: [\d.]+ [KM]iB weights", core.info.memory_plan)
    draft = core._draft_runner
    core.close()
    assert draft is not None
    with pytest.raises(AttributeError):
        draft.execute(plan_of([(0, [1])], [array("i", [0])]))
