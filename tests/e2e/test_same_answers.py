"""The answer depends on the request alone: 64 requests in a crowd get what each gets alone on an idle engine.

The demo model in float32, prompts that share beginnings, lengths from a line to a thousand tokens, requests that come
and go at any time, and a pool so small that sequences are preempted. Copying and recalling catch a corrupted cache.
"""

from collections.abc import Iterator

import pytest

from penstock.api.request import FinishReason, Request
from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.text.tokenizer import Tokenizer
from tests.e2e.crowd import Visitor, make_visitors, small_pool


def accept(input_processor: InputProcessor, visitors: list[Visitor]) -> list[Request]:
    return [
        input_processor.make_request(v.prompt, v.params, request_id=str(i), arrival=0.0) for i, v in enumerate(visitors)
    ]


def answer_alone(core: EngineCore, request: Request) -> list[int]:
    tokens: list[int] = []
    core.add_request(request)
    while core.has_work:
        for output in core.step():
            tokens += output.token_ids
    return tokens


def answer_in_company(core: EngineCore, requests: list[Request], visitors: list[Visitor]) -> dict[str, list[int]]:
    """All answers, as far as they got; each request must end exactly once."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    endings: dict[str, FinishReason] = {}
    step = 0
    while core.has_work or len(endings) < len(requests):
        for request, visitor in zip(requests, visitors, strict=True):
            if visitor.comes == step:
                core.add_request(request)
            if visitor.leaves == step:
                core.finish_request(request.request_id, None, FinishReason.ABORT)
        for output in core.step():
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.request_id not in endings, "a request ended twice"
                endings[output.request_id] = output.finish_reason
        if step % 20 == 0:
            core.check_integrity()
        step += 1
    assert FinishReason.ERROR not in endings.values()
    return answers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(DEMO_FOLDER)


@pytest.fixture(scope="module")
def visitors(tokenizer: Tokenizer) -> list[Visitor]:
    return make_visitors(tokenizer, seed=2026)


@pytest.fixture(scope="module")
def alone(tokenizer: Tokenizer, visitors: list[Visitor]) -> Iterator[list[list[int]]]:
    """What each request is answered with nothing else about, and nothing cached."""
    core = build_engine(EngineConfig.from_options(dtype="float32", enable_prefix_caching=False, threads=1))
    yield [answer_alone(core, request) for request in accept(InputProcessor(tokenizer, core.info), visitors)]
    core.close()


@pytest.mark.parametrize(
    ("caching", "speculation"),
    [(True, None), (False, None), (True, "ngram")],
    ids=["prefix cache", "no prefix cache", "speculation"],
)
def test_64_requests_in_a_small_pool_get_the_answers_they_get_alone(
    tokenizer: Tokenizer, visitors: list[Visitor], alone: list[list[int]], caching: bool, speculation: str | None
) -> None:
    options = {"enable_prefix_caching": caching, "speculation": speculation}
    core = build_engine(EngineConfig.from_options(**options, **small_pool()))
    before = core.stats()
    requests = accept(InputProcessor(tokenizer, core.info), visitors)
    answers = answer_in_company(core, requests, visitors)
    for i, (visitor, expected) in enumerate(zip(visitors, alone, strict=True)):
        got = answers[str(i)]
        if visitor.leaves is None:
            assert got == expected, f"request {i} is answered differently in company"
        else:
            assert got == expected[: len(got)], f"request {i}, aborted, began differently in company"
    after = core.stats()
    assert after.preemptions > 0 or speculation, "the pool is too large to prove anything"
    assert (after.prefix_hit_tokens > 0) == caching
    assert (after.accepted_tokens > 0) == (speculation is not None)
    assert after.blocks_held == 0
    assert after.blocks_free + after.blocks_cached == before.blocks_free == core.info.num_blocks
    core.check_integrity()
    core.close()
