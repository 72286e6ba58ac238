"""The rules of transcripts against `transformers`' processors."""

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from penstock.api.transcript_rules import TranscriptRules
from penstock.sampling.transcripts import forbidden

FIRST, END, SIZE = 30, 20, 50
ANSWERS = [
    *([], [30], [33], [30, 4], [30, 4, 35], [30, 4, 35, 35], [30, 4, 35, 35, 7], [30, 4, 35, 35, 7, 40], [4], [4, 33]),
    *([30, 4, 35, 36], [30, 4, 30], [31, 5, 6, 49], [31, 5, 6, 49, 49]),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
@pytest.mark.parametrize("max_initial", [None, 5])
def test_timestamps_follow_the_rules_of_transformers(answer, max_initial):
    config = transformers.GenerationConfig(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, max_initial_timestamp_index=max_initial
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    rules = TranscriptRules(FIRST, END, max_initial=max_initial)
    for seed in range(6):
        logits = np.random.default_rng(seed).normal(0, 3, SIZE).astype(np.float32)
        logits[FIRST:] += 2 * (seed % 3 - 1)
        expected = processor(torch.tensor([[1, 2, *answer]]), torch.from_numpy(logits)[None])[0]
        assert forbidden(logits, answer, rules).tolist() == torch.isneginf(expected).tolist()


def test_an_answer_does_not_begin_with_what_the_checkpoint_suppresses_there():
    rules = TranscriptRules(FIRST, END, (3, END), has_timestamps=False)
    logits = np.zeros(SIZE, np.float32)
    assert np.flatnonzero(forbidden(logits, [], rules)).tolist() == [3, END]
    assert not forbidden(logits, [5], rules).any()
