"""Drafts for models with recurrent layers, some of them wrong: the answers are those without, bit for bit."""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine_config import EngineConfig
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft, Speculation
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from tests.core.fakes import make_request
from tests.support.checkpoints import write_random
from tests.support.hybrid import SHAPE

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
    },
    "Lfm2": {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "GraniteMoeHybrid": {
        "num_key_value_heads": 1,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "position_embedding_type": "nope",
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CASES = [("Qwen3_5", precision) for precision in PRECISIONS] + [("Lfm2", "float32"), ("GraniteMoeHybrid", "float32")]
PROMPTS = [[(5 * place + seed) % 96 for place in range(length)] for seed, length in ((1, 23), (2, 6), (3, 41))]
LENGTH = 40


class Rehearsed:
    """Guesses what was answered before, every fourth token another."""

    free = True

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.answers = answers

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._guess(seq, limit) for seq, limit in wanted]

    def _guess(self, seq: Sequence, limit: int) -> Draft:
        first = len(seq.tokens) - seq.num_prompt_tokens
        known = self.answers[seq.request_id][first : first + limit]
        return array("i", [(token + (place % 4 == 3)) % 96 for place, token in enumerate(known, first)])

    def forget_sequence(self, seq: Sequence) -> None:
        pass


def answers_of(core: EngineCore, told: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """The answers to the prompts, all at once; of `told` what an engine before has told of them already."""
    found = {str(index): list((told or {}).get(str(index), [])) for index in range(len(PROMPTS))}
    for index, prompt in enumerate(PROMPTS):
        begun = found[str(index)]
        core.add_request(make_request(str(index), prompt, LENGTH, stop_token_ids=()), (tuple(begun),) if begun else ())
    while core.has_work:
        for output in core.step():
            assert output.finish_reason != "error", output.error
            found[output.request_id] += output.token_ids
        core.check_integrity()
    return found


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_answers_are_those_without_drafts(tmp_path: Path, family: str, precision: str) -> None:
    write_random(tmp_path, family, **SHAPE, **FAMILIES[family])
    options = {"speculation": "ngram", "block_size": 4, "kv_cache_memory": "8MiB", "threads": 1, "max_num_seqs": 4}
    core = build_engine(EngineConfig.from_options(model=str(tmp_path), **options, **PRECISIONS[precision]))
    plain, small = core.settings, replace(core.settings, memory=core.settings.memory.with_fewer_blocks(30))

    def restart(drafted: dict[str, list[int]] | None, *, tiny: bool = False) -> None:
        drafting = None if drafted is None else Speculation([Rehearsed(drafted)], 6, lambda: 0.0)
        core.restart(small if tiny else plain, drafting)

    restart(None)
    wanted = answers_of(core)
    restart(wanted)
    assert answers_of(core) == wanted
    stats = core.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert answers_of(core) == wanted, "from the prefix cache"
    assert core.stats().prefix_hit_tokens > 0
    restart(wanted, tiny=True)
    assert answers_of(core) == wanted, "preempted"
    assert core.stats().preemptions > 0
    for length in (1, 9):
        restart(wanted)
        assert answers_of(core, {name: answer[:length] for name, answer in wanted.items()}) == wanted, "resumed"
    core.close()
