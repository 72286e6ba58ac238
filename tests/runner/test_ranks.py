"""Ranks as processes of their own: the same answers, and what happens when one of them ends."""

import os
import signal
from pathlib import Path

import pytest

from penstock import SamplingParams
from penstock.checkpoint import Checkpoint
from penstock.config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.errors import DeviceLostError
from penstock.frontend.input_processor import InputProcessor
from penstock.request import Request
from penstock.runner import ranks
from penstock.runner.ranks import RankedRunner, start_runner
from penstock.settings import Settings
from penstock.tokenizer import Tokenizer
from tests.controls import answer, requests_of
from tests.kernels.versions import needs_native
from tests.waiting import alive


def engine(folder: Path, size: int) -> tuple[EngineCore, list[int]]:
    """An engine of so many ranks, and the process ids of those beside this process."""
    pids: list[int] = []

    def make_runner(checkpoint: Checkpoint, settings: Settings) -> ranks.AnyRunner:
        runner = start_runner(checkpoint, settings)
        pids.extend(runner.pids if isinstance(runner, RankedRunner) else ())
        return runner

    config = EngineConfig.from_options(
        model=str(folder), tensor_parallel_size=size, threads=size, kv_cache_memory="2MiB", block_size=4, seed=0
    )
    return build_engine(config, make_runner=make_runner), pids


def questions(core: EngineCore) -> list[Request]:
    """Under every control of sampling, and of a prompt with its log-probabilities."""
    processor = InputProcessor(Tokenizer.from_path(Path(core.info.model_path)), core.info)
    told = SamplingParams(max_tokens=3, prompt_logprobs=2, seed=1)
    return [*requests_of(processor), processor.make_request("a lazy dog", told, request_id="told", arrival=0.0)]


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


@pytest.mark.parametrize("shared", [pytest.param(True, marks=needs_native), False], ids=["shared memory", "gloo"])
def test_two_processes_answer_as_one_does_until_one_is_killed(
    tiny_llama: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, others = engine(tiny_llama, 1)
    assert not others
    wanted = answer(core, questions(core))
    core.close()
    if not shared:  # as where there is no native library: plans and columns go through torch.distributed
        monkeypatch.setattr(ranks, "shared_file", lambda library, size: None)
    core, (other,) = engine(tiny_llama, 2)
    asked = questions(core)
    assert answer(core, asked) == wanted
    for request in asked:
        core.add_request(request)
    core.step()
    os.kill(other, signal.SIGKILL)
    with pytest.raises(DeviceLostError):
        finish(core)
    assert not alive(other)
    core.close()


def test_ranks_end_with_the_engine(tiny_llama: Path) -> None:
    core, (other,) = engine(tiny_llama, 2)
    assert alive(other)
    core.close()
    assert not alive(other)
