"""Speculation changes no answer: tokens, log-probabilities, texts and endings are those without, bit for bit.

Two small random models, of which one is the other with noise, so that it guesses right often and wrong often; n-grams,
where controls make a text repeat itself; and guesses that know the answers. All controls at once in one batch.
"""

from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams, native
from penstock.api.request import CompletionOutput
from penstock.api.sampling_params import Structured
from penstock.config.engine_config import EngineConfig
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft, Speculation
from penstock.engine.build import build_engine
from tests.support.checkpoints import write_tiny_llama

pytestmark = pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact over chunks")

OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_memory": "8MiB", "max_num_seqs": 32, "seed": 3}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 4  # of four tokens: keys and values, layers, heads, float32
PROMPT = "the quick brown fox jumps over the lazy dog the quick brown"
LOOPING = {"allowed_token_ids": (70, 71, 72, 73), "max_tokens": 60}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=3),
    SamplingParams(temperature=0.0, **LOOPING, logprobs=0),
    SamplingParams(temperature=0.7, **LOOPING, seed=1, n=3),
    SamplingParams(temperature=0.3, frequency_penalty=-2.0, max_tokens=80, seed=2, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, max_tokens=50, seed=3, n=2),
    SamplingParams(temperature=1.0, top_k=5, presence_penalty=0.7, frequency_penalty=0.4, max_tokens=50, seed=4),
    SamplingParams(temperature=0.8, min_p=0.1, logit_bias={80: 4.0, 81: 5.0}, max_tokens=50, seed=5),
    SamplingParams(temperature=0.2, typical_p=0.7, frequency_penalty=-1.5, max_tokens=50, seed=6),
    SamplingParams(temperature=0.5, **LOOPING, seed=7, stop_token_ids=(72,), min_tokens=9),
    SamplingParams(temperature=0.5, **LOOPING, seed=8, stop=("qrq", "eded"), min_tokens=3, logprobs=1),
    SamplingParams(temperature=0.4, **LOOPING, seed=9, bad_token_ids=(71,), prompt_logprobs=1),
    SamplingParams(temperature=1.0, structured=Structured("regex", "(ab){4,9}c(de){3,}"), max_tokens=40, seed=10, n=2),
    SamplingParams(temperature=0.9, max_tokens=1, seed=11),
    SamplingParams(num_beams=3, n=2, max_tokens=12),
    SamplingParams(temperature=0.8, max_tokens=30, seed=12, n=2, best_of=4),
]


@pytest.fixture(scope="module")
def noisy_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a little noise: a draft model."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("noisy-llama"))
    generator = torch.Generator().manual_seed(1)
    weights = load_file(tiny_llama / "model.safetensors")
    noisy = {name: w + 0.004 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(llm: LLM) -> list[list[CompletionOutput]]:
    prompts = [f"{PROMPT} {number}" for number in range(len(PARAMS))]
    return [output.outputs for output in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[CompletionOutput]]:
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        found = answers(llm)
    assert {type(output.stop_reason) for outputs in found for output in outputs} == {str, int, type(None)}
    return found


def guessing_llm(**options: Any) -> LLM:
    """By a clock on which guesses cost nothing: the draft model is as large as the other."""
    return LLM(engine=build_engine(EngineConfig.from_options(**options), clock=lambda: 0.0))


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 40}, {"block_size": 4, "num_blocks": 80}])
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_with_n_grams_and_with_a_draft_model(
    tiny_llama: Path, noisy_llama: Path, expected: list[list[CompletionOutput]], kind: str, limits: dict[str, Any]
) -> None:
    options = OPTIONS | limits | {"speculation": kind}
    if kind == "draft":
        options["speculative_model"] = str(noisy_llama)
    if "num_blocks" in limits:
        options["kv_cache_memory"] = options.pop("num_blocks") * BLOCK_BYTES * (2 if kind == "draft" else 1)
    with guessing_llm(model=str(tiny_llama), **options) as llm:
        for _ in range(2):  # and once more, with prompts from the prefix cache
            assert answers(llm) == expected
            llm._engine.check_integrity()
        stats = llm.stats()
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert stats.blocks_held == 0
        assert (stats.preemptions > 0) == ("num_blocks" in limits)


class Knowing:
    """Guesses what the answers are known to be, and every third token something else."""

    free = True

    def __init__(self, known: list[list[CompletionOutput]]) -> None:
        self.known, self.rng = known, Random(2)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: Sequence, limit: int) -> Draft:
        begun = seq.tokens[seq.num_prompt_tokens :].tolist()
        known = [output.token_ids for outputs in self.known for output in outputs]
        rest = next((ids[len(begun) :][:limit] for ids in known if ids[: len(begun)] == begun and begun), [])
        return array("i", [token if self.rng.random() < 0.7 else token ^ 1 for token in rest])

    def forget_sequence(self, seq: Sequence) -> None:
        pass


def test_with_guesses_that_know_the_answers(tiny_llama: Path, expected: list[list[CompletionOutput]]) -> None:
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        llm._engine.restart(llm._engine.settings, Speculation([Knowing(expected)], 8, clock=lambda: 0.0))
        assert answers(llm) == expected
        assert llm.stats().accepted_tokens > 100
