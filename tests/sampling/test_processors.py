"""What is done to logits, and the processors of `transformers` beside it."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from penstock.api.sampling_params import ResolvedParams
from penstock.core.plan import SampleBatch
from penstock.sampling.sampler import processed as processed_by
from penstock.sampling.state import SlotStates
from tests.sampling.batches import OPS, batch_of, params, some_logits

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
RUNS = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)


class Mask:
    """A grammar's, known in advance."""

    def __init__(self, rows: list[int], allowed: Any) -> None:
        self.rows = rows
        self._bits = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)

    def result(self) -> Any:
        return self._bits


@contextmanager
def processed(logits: Tensor, batch: SampleBatch) -> Iterator[None]:
    """With the states of sequences that were never seen before."""
    states = SlotStates(len(batch))
    with processed_by(OPS, logits, batch, states, states.assign(batch)):
        yield


def after(logits: Tensor, batch: SampleBatch) -> Tensor:
    """The logits as processed; afterwards those must be what they were of which log-probabilities are wanted."""
    changed = logits.clone()
    with processed(changed, batch):
        found = changed.clone()
    kept = [row for row, seq in enumerate(batch.sequences) if seq.params.logprobs is not None]
    assert torch.equal(changed[kept], logits[kept])
    return found


def expected(logits: Tensor, history: list[int], prompt_len: int, params: ResolvedParams) -> Tensor:
    """What `transformers` makes of one row [vocab]; OpenAI's and TGI's penalties, which it lacks, stand in between."""
    processors = LogitsProcessorList()
    text = torch.tensor([history])
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = torch.as_tensor(processors(text, logits[None].clone()))
    for token, count in Counter(history[prompt_len:]).items():
        scores[0, token] -= count * params.frequency_penalty + params.presence_penalty
    for token, count in Counter(history).items():
        scores[0, token] -= count / len(history) * params.share_penalty
    processors = LogitsProcessorList()
    if params.banned:
        processors.append(NoBadWordsLogitsProcessor([list(run) for run in params.banned]))
    if params.min_tokens:
        stops = list(params.stop_token_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, stops))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    return torch.as_tensor(processors(text, scores))[0]


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 12)), min_size=1),
    penalty=st.sampled_from([1.0, 1.3, 0.5]),
    frequency=st.sampled_from([0.0, 0.7, -2.0]),
    presence=st.sampled_from([0.0, 1.5, -0.4]),
    share=st.sampled_from([0.0, 2.0]),
    bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
    banned=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), max_size=6, unique=True),
    min_tokens=st.integers(0, 6),
    allowed=st.none() | st.lists(TOKENS, min_size=1, max_size=30, unique=True),
    seed=st.integers(0, 9),
)
def test_each_row_is_processed_as_transformers_does_it(
    texts: list[tuple[list[int], int]],
    penalty: float,
    frequency: float,
    presence: float,
    share: float,
    bias: dict[int, float],
    banned: list[tuple[int, ...]],
    min_tokens: int,
    allowed: list[int] | None,
    seed: int,
) -> None:
    """In one batch, each with some of the controls."""
    controls: dict[str, Any] = {
        "repetition_penalty": penalty,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "share_penalty": share,
        "logit_bias": tuple(bias.items()),
        "banned": tuple(banned),
        "min_tokens": min_tokens,
        "allowed_token_ids": None if allowed is None else tuple(sorted(allowed)),
    }
    rng = random.Random(seed)
    wanted = [
        params(stop_token_ids=(3, 9), logprobs=rng.choice([None, 0]), **dict(rng.sample(sorted(controls.items()), 5)))
        for _ in texts
    ]
    logits = some_logits(len(texts), VOCAB, seed)
    histories = [text for text, _ in texts]
    prompts = [min(prompt, len(text)) for text, prompt in texts]
    batch = batch_of(
        wanted,
        num_generated=[len(text) - prompt for text, prompt in zip(histories, prompts, strict=True)],
        histories=histories,
    )
    right = [expected(*row) for row in zip(logits, histories, prompts, wanted, strict=True)]
    found = after(logits, batch)
    left = found.isfinite().any(-1)  # where no token is left, transformers gives one that was ruled out
    torch.testing.assert_close(found[left], torch.stack(right)[left], rtol=1e-6, atol=1e-6)


def test_drafts_behind_a_row_are_not_its_history() -> None:
    """Rows of one sequence: each sees the tokens before its own position."""
    wanted = [params(repetition_penalty=2.0, presence_penalty=1.0, banned=((5, 6),))] * 3
    history = [1, 2, 5, 6]
    batch = batch_of(wanted, positions=[2, 3, 4], num_generated=[0, 1, 2], histories=[history] * 3)
    found = after(torch.ones(3, 10), batch)
    seen = [[round(x, 3) for x in row] for row in found.tolist()]
    assert seen[0] == [1, 0.5, 0.5, 1, 1, 1, 1, 1, 1, 1]
    assert seen[1] == [1, 0.5, 0.5, 1, 1, -0.5, -math.inf, 1, 1, 1]
    assert seen[2] == [1, 0.5, 0.5, 1, 1, -0.5, -0.5, 1, 1, 1]


def test_a_grammar_rules_out_what_it_does_not_allow_in_its_rows_alone() -> None:
    logits = some_logits(4, 70)
    allowed = np.zeros((2, 96), bool)
    allowed[0, [5, 64]], allowed[1, :70] = True, True
    batch = batch_of([params(), params(logprobs=1), params(), params()])
    batch.mask = Mask([1, 2], allowed)
    before = logits.clone()
    with processed(logits, batch):
        assert torch.equal(logits.isfinite().sum(-1), torch.tensor([70, 2, 70, 70]))
        assert logits[1, [5, 64]].tolist() == before[1, [5, 64]].tolist()
    assert torch.equal(logits[1], before[1])


def test_a_row_is_processed_the_same_alone_and_in_a_batch() -> None:
    rng = random.Random(1)
    histories = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 300))] for _ in range(32)]
    wanted = [
        params(
            repetition_penalty=rng.choice([1.0, 1.17, 0.9]),
            frequency_penalty=rng.choice([0.0, 0.31]),
            presence_penalty=rng.choice([0.0, -0.77]),
            share_penalty=rng.choice([0.0, 1.1]),
            logit_bias=rng.choice([(), ((3, 0.123), (9, -5.5))]),
        )
        for _ in histories
    ]
    generated = [rng.randrange(len(history)) for history in histories]
    logits = some_logits(32, VOCAB)
    together = after(logits, batch_of(wanted, num_generated=generated, histories=histories))
    for row in range(32):
        batch = batch_of(wanted[row : row + 1], num_generated=generated[row : row + 1], histories=[histories[row]])
        assert torch.equal(after(logits[row : row + 1].clone(), batch)[0], together[row])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_so(bad: float) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3] = bad
    controls = params(
        repetition_penalty=1.5, presence_penalty=1.0, share_penalty=1.0, banned=((3,),), logit_bias=((3, -100.0),)
    )
    found = after(logits.nan_to_num(nan=0.0, posinf=0.0), batch_of([controls], histories=[[3, 4]]))
    assert found[0, 3] == -math.inf
    with processed(logits, batch_of([controls], histories=[[3, 4]])):
        assert not logits[0, 3] < math.inf


def test_rows_without_controls_cost_no_change() -> None:
    logits = some_logits(3, VOCAB)
    assert torch.equal(after(logits, batch_of([params()] * 3)), logits)
