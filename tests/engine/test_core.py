"""The engine core over a real model: steps that fail, and devices that are lost."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.api.request import ErrorReason, FinishReason, Request, SequenceOutput
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.core.kv_manager import CacheGroup
from penstock.engine.core import EngineCore, PendingRequests
from penstock.errors import DeviceLostError
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.frontend.input_processor import InputProcessor
from tests.core.fakes import make_request, make_scheduler
from tests.core.images import ImageRunner, make_image, make_images, make_tower, placeholders
from tests.engine.losing_engine import FATAL, FAULTY, LOSING_ENGINE, build_losing_engine

GOOD = [[5, 17, 300], [42, 8, 99, 250], [7]]
OPTIONS = {"kv_cache_memory": "4MiB", "threads": 1}


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be marked."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def request(input_processor: InputProcessor, name: str, prompt: list[int]) -> Request:
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, repetition_penalty=1.2)
    return input_processor.make_request(prompt, params, request_id=name, arrival=0.0)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(folder: Path) -> None:
    core = build_losing_engine(EngineConfig.from_options(model=str(folder), **OPTIONS))
    input_processor = InputProcessor(None, core.info)
    core.add_request(request(input_processor, "bad", [FAULTY]))
    (ending,) = core.step()
    assert (ending.finish_reason, ending.error) == (FinishReason.ERROR, "the step failed: a kernel has a bug")
    core.add_request(request(input_processor, "good", GOOD[0]))
    outputs: list[SequenceOutput] = []
    while core.has_work:
        outputs += core.step()
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    core.check_integrity()
    core.close()


def test_a_lost_device_ends_the_engine(folder: Path) -> None:
    core = build_losing_engine(EngineConfig.from_options(model=str(folder), **OPTIONS))
    core.add_request(request(InputProcessor(None, core.info), "a", [FATAL]))
    with pytest.raises(DeviceLostError, match="the device is lost: CUDA error: an illegal memory access"):
        core.step()
    core.close()


def test_a_step_of_the_vision_tower_alone_is_in_flight_and_what_the_tower_cannot_encode_is_refused() -> None:
    images = make_images(make_tower(layer_elements=40))
    scheduler = make_scheduler(groups=(CacheGroup(16),), budget=4, images=images)
    runner: Any = ImageRunner((CacheGroup(16),), 4, images)
    nothing: Any = None
    core = EngineCore(nothing, nothing, scheduler, runner, nothing, PendingRequests(lambda request: []))
    begun: list[tuple[int, list[int]]] = []
    for number, picture in enumerate((make_image(1), make_image(2, 4, 4))):
        prompt = [*placeholders(picture), 2]
        runner.requests[number] = make_request(f"r{number}", prompt, 1, images=(picture,), seed=number)
        core.add_request(runner.requests[number])
    outputs = [*core.step(lambda num_tokens, indices: begun.append((num_tokens, list(indices))))]
    assert begun == [(images.layer_tokens(make_image(1)), [0])]
    while core.has_work:
        outputs += core.step()
    (refused,) = [output for output in outputs if output.request_id == "r1"]
    assert refused.error_reason is ErrorReason.IMAGE_NOT_ENCODED
    assert str(refused.error).startswith("an image of 8 x 8 pixels takes 16 tokens of 16 patches")
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def answers_of(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """What streams that are open at one time answer, and how often the engine was started again."""

    async def one(engine: AsyncEngine, name: str, prompt: list[int]) -> list[int]:
        params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, repetition_penalty=1.2)
        tokens: list[int] = []
        with engine.open([engine.accept_request(prompt, params, request_id=name)], stream=True) as request_stream:
            async for deltas in request_stream:
                for _, delta in deltas:
                    tokens += delta.token_ids
                    assert delta.finish_reason in (None, FinishReason.LENGTH)
        return tokens

    async def run() -> tuple[list[list[int]], int]:
        config = EngineConfig.from_options(model=str(folder), **OPTIONS)
        engine = await AsyncEngine.start(config, EngineLink(config, LOSING_ENGINE), 30.0)
        try:
            running = [one(engine, f"r{index}", prompt) for index, prompt in enumerate(prompts)]
            answers = await asyncio.wait_for(asyncio.gather(*running), 60)
            return answers, int(engine.metrics.restarts.values.get("", 0))
        finally:
            await engine.close()

    return asyncio.run(run())


def test_open_streams_go_on_in_a_new_process_when_the_device_is_lost(folder: Path) -> None:
    prompts = [*GOOD, [FATAL, 4]]
    (folder / "lost").touch()
    undisturbed, restarts = answers_of(folder, prompts)
    assert restarts == 0
    (folder / "lost").unlink()
    answers, restarts = answers_of(folder, prompts)
    assert answers == undisturbed
    assert restarts == 1
