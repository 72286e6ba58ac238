"""Beam search and prompt log-probabilities against transformers, and against themselves under pressure."""

import itertools

import pytest
import torch

from penstock import LLM, SamplingParams, native
from tests.support.checkpoints import write_few_tokens

STOPS = [0, 3, 7, 11]
PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 37)), [40, 2, 40, 2, 40, 2, 40, 2, 1]]
SEARCHES = list(itertools.product([2, 5], [-1.0, 0.0, 1.0, 2.0], [False, True, "never"]))
OPTIONS = {"block_size": 4, "kv_cache_memory": "1MiB", "threads": 1, "max_num_seqs": 16}

exact = pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact across batches")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("few-tokens")
    return folder, write_few_tokens(folder)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint[0]), **OPTIONS) as opened:
        yield opened


def params_of(search, **fields):
    num_beams, penalty, early = search
    return SamplingParams(
        num_beams=num_beams, length_penalty=penalty, early_stopping=early, stop_token_ids=STOPS, max_tokens=14, **fields
    )


def found_by(llm, searches):
    """(tokens, score) of the hypotheses of each search, with the prompts in turns, all run together."""
    asked = [(prompt, params_of(search, n=search[0])) for prompt, search in with_prompts(searches)]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    llm._engine.check_integrity()
    return [[(answer.token_ids, answer.score) for answer in output.outputs] for output in outputs]


def with_prompts(searches):
    return list(zip(itertools.cycle(PROMPTS), searches, strict=False))


def generate(model, prompt, search):
    num_beams, penalty, early = search
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=penalty,
            early_stopping=early,
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=STOPS,
            pad_token_id=47,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()


def test_hypotheses_and_scores_are_those_of_transformers(checkpoint, llm):
    ended = set()
    for (prompt, search), found in zip(with_prompts(SEARCHES), found_by(llm, SEARCHES), strict=True):
        sequences, scores = generate(checkpoint[1], prompt, search)
        for (token_ids, score), sequence, expected in zip(found, sequences, scores, strict=True):
            assert token_ids == sequence[: len(token_ids)]
            assert set(sequence[len(token_ids) :]) <= {47}, "the rest is padding"
            assert score == pytest.approx(expected, rel=1e-6, abs=1e-5)  # of float32, which theirs is
            ended.add(token_ids[-1] in STOPS)
    assert ended == {True, False}, "some end by a stop token, some by length"


@exact
@pytest.mark.parametrize("caching", [True, False])
def test_a_search_finds_the_same_bit_for_bit_where_there_is_hardly_room_for_one_beam(checkpoint, llm, caching):
    block = 2 * 2 * 2 * 16 * 4 * 4  # keys and values of 4 tokens, 2 layers, 2 heads of 16, float32
    tight = {"kv_cache_memory": 10 * block, "max_num_seqs": 5, "max_num_batched_tokens": 7, "max_model_len": 40}
    searches = [SEARCHES[0], SEARCHES[-1], SEARCHES[6]]
    with LLM(str(checkpoint[0]), **OPTIONS | tight, enable_prefix_caching=caching) as small:
        assert found_by(small, searches) == found_by(llm, searches)
        assert small.stats().preemptions > 0


def test_tokens_of_a_hypothesis_have_the_logprobs_that_make_its_score(llm):
    for answer in llm.generate(PROMPTS[0], params_of((5, 1.0, False), n=5, logprobs=2))[0].outputs:
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        assert all(len(entry.top) == 2 for entry in answer.logprobs)
        mean = sum(entry.logprob for entry in answer.logprobs) / len(answer.token_ids)
        assert answer.score == pytest.approx(mean)


def test_a_stop_token_does_not_end_a_hypothesis_before_min_tokens(llm):
    for answer in llm.generate(PROMPTS[0], params_of((5, 1.0, False), n=5, min_tokens=4))[0].outputs:
        assert not set(STOPS).intersection(answer.token_ids[:4])


# ── the prompt's log-probabilities ───────────────────────────────────────────────────────────────────────────────────


def test_prompt_logprobs_are_those_of_transformers(checkpoint, llm):
    prompt = PROMPTS[1] * 3  # longer than the portions that logits are computed in
    output = llm.generate(prompt, SamplingParams(prompt_logprobs=3, max_tokens=0))[0]
    with torch.no_grad():
        expected = checkpoint[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    first, *entries = output.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in entries] == prompt[1:]
    for row, entry in zip(expected, entries, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-5)
        values, tokens = row.topk(3)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


@exact
def test_prompt_logprobs_are_the_same_bit_for_bit_in_chunks_from_the_cache_and_after_preemption(checkpoint, llm):
    asked = [SamplingParams(n=n, prompt_logprobs=2, max_tokens=20, ignore_eos=True, seed=1) for n in (1, 2, 3)]
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, asked, strict=True)]
    small = {"kv_cache_memory": 2**15, "max_num_seqs": 6, "max_num_batched_tokens": 6, "max_model_len": 60}
    with LLM(str(checkpoint[0]), **OPTIONS | small) as pressed:
        for _ in range(2):
            together = pressed.generate(PROMPTS, asked)
            assert [output.prompt_logprobs for output in together] == [output.prompt_logprobs for output in alone]
            assert [o.token_ids for output in together for o in output.outputs] == [
                o.token_ids for output in alone for o in output.outputs
            ]
        assert pressed.stats().preemptions > 0
        assert pressed.stats().prefix_hit_tokens > 0


def test_a_stream_tells_the_prompts_logprobs_before_the_first_token(llm):
    deltas = list(llm.stream(PROMPTS[1], SamplingParams(prompt_logprobs=0, max_tokens=3, ignore_eos=True)))
    first = next(place for place, delta in enumerate(deltas) if delta.token_ids)
    told = [entry.token_id for delta in deltas[:first] for entry in delta.prompt_logprobs or ()]
    assert told == PROMPTS[1][1:]
    assert not any(delta.prompt_logprobs for delta in deltas[first:])


# ── the best of several ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_best_of_several_are_those_of_the_highest_mean_logprob(llm):
    fields = {"max_tokens": 6, "seed": 3, "temperature": 2.0, "stop_token_ids": STOPS}
    every = llm.generate(PROMPTS[0], SamplingParams(n=8, logprobs=0, **fields))[0].outputs
    best = llm.generate(PROMPTS[0], SamplingParams(n=3, best_of=8, **fields))[0]
    ranked = sorted(every, key=lambda one: -sum(entry.logprob for entry in one.logprobs) / len(one.logprobs))
    assert [answer.token_ids for answer in best.outputs] == [answer.token_ids for answer in ranked[:3]]
    assert [answer.index for answer in best.outputs] == [0, 1, 2]
    assert all(answer.logprobs is None for answer in best.outputs)
    assert best.num_generated_tokens == sum(len(answer.token_ids) for answer in every)
