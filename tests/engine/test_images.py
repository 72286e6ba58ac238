"""Requests with pictures through a whole engine: the answers of `transformers`, cut in any way and beside others."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.api.request import Image, Request
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from tests.support.params import GREEDY
from tests.support.vision import Seen, image_of, make

COUNT = 5


@pytest.fixture(scope="module", params=["SmolVLM", "Qwen3-VL", "Gemma 3"], ids=lambda name: name.replace(" ", "_"))
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return make(request.param, tmp_path_factory.mktemp("seen"))


def engine(seen: Seen, **options: Any) -> EngineCore:
    defaults = {"model": str(seen.folder), "block_size": 4, "kv_cache_memory": "1MiB", "threads": 1}
    config = EngineConfig.from_options(**(defaults | options))
    return build_engine(config, clock=lambda: 0.0)


def request_of(seen: Seen, name: str, images: list[Image]) -> Request:
    return Request(name, tuple(seen.tokens), replace(GREEDY, max_tokens=COUNT), 0.0, images=tuple(images))


def answers(core: EngineCore, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        core.add_request(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for output in core.step():
            assert output.finish_reason != "error", output.error
            found[output.request_id] += output.token_ids
    return found


def others(seen: Seen) -> list[Image]:
    """The same places, with other pictures."""
    return [
        image_of(255 - pixels, image.start, image.rows, image.columns)
        for pixels, image in zip(seen.pictures, seen.images, strict=True)
    ]


def test_answers_are_those_of_transformers_alone_beside_others_cached_and_cut(seen: Seen) -> None:
    expected = seen.greedy(COUNT)
    whole = engine(seen)
    first = answers(whole, request_of(seen, "a", seen.images))["a"]
    assert first == expected
    different = answers(whole, request_of(seen, "b", others(seen)))["b"]
    assert answers(whole, request_of(seen, "c", seen.images))["c"] == first, "from the prefix cache"
    small = engine(seen, max_num_batched_tokens=24, max_num_seqs=3)
    together = answers(
        small,
        request_of(seen, "a", seen.images),
        request_of(seen, "b", others(seen)),
        request_of(seen, "c", seen.images),
    )
    assert together == {"a": first, "b": different, "c": first}
