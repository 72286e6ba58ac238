"""Answers about images and sounds: the same alone, in company, in chunks, cached, preempted and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.api.request import FinishReason, Request
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig, Role
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from tests.support import omni
from tests.support.omni import Omni
from tests.support.vision import Seen, make


@pytest.fixture(scope="module", params=["SmolVLM", "Qwen3-VL", "Gemma 3", "InternVL", "Qwen3-Omni"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen | Omni:
    folder = tmp_path_factory.mktemp("seen")
    return omni.make(request.param, folder, order="is") if "Omni" in request.param else make(request.param, folder)


def start(folder: Path, role: Role = "any", **options: object) -> EngineCore:
    options = {"kv_cache_memory": "2MiB", "threads": 1, "block_size": 8} | options
    return build_engine(replace(EngineConfig.from_options(model=str(folder), **options), role=role))


def ask(core: EngineCore, seen: Seen | Omni, name: str, *, swap: bool = False, max_tokens: int = 8) -> Request:
    """A question about the pictures; with `swap` about the same ones in the other order, where they are of one size."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    request = InputProcessor(None, core.info).make_request(seen.tokens, params, request_id=name, arrival=0.0)
    images = tuple(seen.images)
    if swap:
        first, second = images
        images = (replace(first, digest=bytes(32), pixels=bytes(len(first.pixels))), second)
    return replace(request, images=images)


def answers(core: EngineCore, *requests: Request) -> list[list[int]]:
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add_request(request)
    while core.has_work:
        for output in core.step():
            told[output.request_id] += output.token_ids
            assert output.finish_reason in (None, FinishReason.LENGTH), output.error
    core.check_integrity()
    return list(told.values())


def test_answers_about_images_are_the_same_alone_in_company_in_chunks_and_cached(seen: Seen | Omni) -> None:
    core = start(seen.folder)
    (alone,) = answers(core, ask(core, seen, "a"))
    assert core.stats().encoded_images == 2
    assert answers(core, ask(core, seen, "b")) == [alone]
    assert core.stats().encoded_images == 2
    assert core.stats().prefix_hit_tokens > 0
    (other,) = answers(core, ask(core, seen, "c", swap=True))
    assert core.stats().encoded_images == 3, "it has another picture in the first place"
    core.restart(core.settings)
    assert answers(core, ask(core, seen, "d")) == [alone], "the runner has freed what the new scheduler does not know"
    assert core.stats().encoded_images == 2
    core.close()
    least = max(image.count for image in seen.images) + 5
    small = start(seen.folder, max_num_seqs=4, max_num_batched_tokens=least, speculation="ngram")
    names = [("a", False), ("b", True), ("c", False)]
    requests = [ask(small, seen, name, swap=swap) for name, swap in names]
    assert answers(small, *requests) == [alone, other, alone]
    small.add_request(replace(requests[0], request_id="resumed"), (tuple(alone[:3]),))
    assert [
        token for _ in range(50) if small.has_work for output in small.step() for token in output.token_ids
    ] == alone[3:]
    small.close()


def test_answers_about_images_are_the_same_after_preemption(seen: Seen | Omni) -> None:
    roomy = start(seen.folder)
    requests = [ask(roomy, seen, str(number), swap=bool(number % 2), max_tokens=40) for number in range(4)]
    expected = answers(roomy, *requests)
    num_bytes = roomy.settings.memory.kv_cache // roomy.settings.memory.num_blocks
    roomy.close()
    needed = -(-(len(seen.tokens) + 40) // 8)
    tight = start(
        seen.folder,
        kv_cache_memory=num_bytes * (needed + 12),
        enable_prefix_caching=False,
        max_model_len=len(seen.tokens) + 40,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    assert answers(tight, *requests) == expected
    assert tight.stats().preemptions > 0
    tight.close()


def test_blocks_of_images_come_back_from_the_disk_without_their_images(seen: Seen | Omni, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        core = start(seen.folder, kv_disk=str(tmp_path / "kv"))
        found.append(
            (answers(core, ask(core, seen, "a"), ask(core, seen, "b", swap=True)), core.stats().encoded_images)
        )
        core.close()
    assert found[0][0] == found[1][0]
    assert [count for _, count in found] == [3, 0]


def test_an_engine_that_gets_the_blocks_of_a_prompt_encodes_no_image(seen: Seen | Omni) -> None:
    prefill, decode = start(seen.folder, "prefill"), start(seen.folder, "decode")
    request = ask(prefill, seen, "a")
    (expected,) = answers(prefill, request)
    prefill.add_request(request)
    told = [token for output in prefill.step() for token in output.token_ids]
    prefill.hand_over("a")
    while not (handed := prefill.drain_handovers()):
        prefill.poll_transfers()
    ((_, source),) = handed
    assert source is not None
    decode.add_request(request, (tuple(told),), source)
    while decode.has_work:
        told += [token for output in decode.step() for token in output.token_ids]
    assert told == expected
    assert decode.stats().encoded_images == 0
    prefill.close()
    decode.close()
