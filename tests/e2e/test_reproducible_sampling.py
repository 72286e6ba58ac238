"""A seed gives the same text alone, in a batch, streamed, after preemption and where an engine before it left off.

Under every control of sampling, on a tiny random model.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams, native
from penstock.api.request import Request
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.text.tokenizer import Tokenizer
from tests.support.controls import CONTROLS, PROMPTS, Answer, answer, requests_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact over chunks")


@pytest.fixture(scope="module")
def core(tiny_llama: Path) -> Iterator[EngineCore]:
    made = build_engine(EngineConfig.from_options(model=str(tiny_llama), kv_cache_memory="8MiB", threads=1))
    yield made
    made.close()


@pytest.fixture(scope="module")
def requests(core: EngineCore, tiny_llama: Path) -> list[Request]:
    return requests_of(InputProcessor(Tokenizer.from_path(tiny_llama), core.info))


@pytest.fixture(scope="module")
def alone(core: EngineCore, requests: list[Request]) -> dict[str, Answer]:
    """What each request is answered with nothing else about."""
    return {name: given for request in requests for name, given in answer(core, [request]).items()}


def test_controls_are_obeyed(requests: list[Request], alone: dict[str, Answer], tiny_llama: Path) -> None:
    tokenizer = Tokenizer.from_path(tiny_llama)
    texts = {name: tokenizer.decode(tokens) for name, (tokens, _) in alone.items()}
    assert len(set(texts.values())) > len(CONTROLS)
    for request in requests:
        params, tokens = request.params, alone[request.request_id][0]
        assert {run for run in params.banned if len(run) == 1}.isdisjoint((token,) for token in tokens)
        assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
        assert len(tokens) >= params.min_tokens
        text = (*request.prompt_token_ids, *tokens)
        for run in params.banned:
            ends = range(len(request.prompt_token_ids) + 1, len(text) + 1)
            assert all(text[end - len(run) : end] != run for end in ends)


def test_in_a_batch(core: EngineCore, requests: list[Request], alone: dict[str, Answer]) -> None:
    for seed in range(2):
        shuffled = random.Random(seed).sample(requests, len(requests))
        assert answer(core, shuffled) == alone


def test_after_preemption(tiny_llama: Path, requests: list[Request], alone: dict[str, Answer]) -> None:
    options = {"kv_cache_memory": "48KiB", "block_size": 4, "max_num_seqs": 16, "threads": 1}
    core = build_engine(EngineConfig.from_options(model=str(tiny_llama), max_model_len=80, **options))
    assert answer(core, requests) == alone
    assert core.stats().preemptions > 0
    core.close()


def test_where_an_engine_left_off(core: EngineCore, requests: list[Request], alone: dict[str, Answer]) -> None:
    rng = random.Random(3)
    cuts = {name: rng.randrange(1, len(tokens)) for name, (tokens, _) in alone.items() if len(tokens) > 1}
    before = {
        name: (alone[name][0][:cut], None if alone[name][1] is None else (alone[name][1] or [])[:cut])
        for name, cut in cuts.items()
    }
    assert answer(core, requests, before) == alone


def test_streamed(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), kv_cache_memory="8MiB", threads=1) as llm:
        every = [SamplingParams(**{"seed": 7, "max_tokens": 16, "ignore_eos": True} | c) for c in CONTROLS]
        whole = [output.outputs[0] for output in llm.generate([PROMPTS[0]] * len(every), every)]
        for params, answer in zip(every, whole, strict=True):
            pieces = list(llm.stream(PROMPTS[0], params))
            assert "".join(piece.text for piece in pieces) == answer.text
            assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids


def test_an_answer_that_comes_to_where_no_token_is_left_ends_alone_with_words(
    core: EngineCore, requests: list[Request], alone: dict[str, Answer]
) -> None:
    params = replace(requests[0].params, allowed_token_ids=(65,), banned=((65, 65, 65),), logprobs=1)
    core.add_request(replace(requests[0], request_id="stuck", params=params))
    for request in requests:
        core.add_request(request)
    tokens: dict[str, list[int]] = {}
    endings: dict[str, str | None] = {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                endings[output.request_id] = output.error
    assert tokens.pop("stuck") == [65, 65]
    assert "no token is allowed here" in (endings.pop("stuck") or "")
    assert tokens == {name: answer for name, (answer, _) in alone.items()}
    assert set(endings.values()) == {None}
