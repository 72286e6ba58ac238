"""The runner as the engine uses it: plans in, tokens out."""

import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock import native
from penstock.core.plan import BlockCopy, StepPlan
from penstock.errors import MissingTorchError
from penstock.kernels.tables import make_ops
from penstock.runner.device_runner import DeviceRunner
from tests.support.needs import needs_native
from tests.support.stepping import Stepper, plan_of, settings_for, spying

PROMPT = [5, 17, 300, 42, 8, 99, 250]
TABLE = array("i", range(10, 40))


@pytest.fixture
def runner(tiny_llama: Path) -> DeviceRunner:
    return DeviceRunner(*settings_for(tiny_llama))


def plan(
    parts: list[tuple[int, list[int]]],
    sampled_rows: Sequence[int] = (),
    positions: Sequence[int] = (),
    tables: list["array[int]"] | None = None,
) -> StepPlan:
    """Each part is (start, tokens)."""
    return plan_of(parts, tables or [TABLE] * len(parts), sampled_rows, positions)


def greedy(folder: Path, count: int) -> list[int]:
    """The prompt's answer, computed anew from the whole text for every token."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(Stepper(folder, 1).step({0: tokens})[0][-1].argmax()))
    return tokens[len(PROMPT) :]


def test_memory_is_made_ready_up_to_the_last_block_of_a_step(tiny_llama: Path) -> None:
    ready: list[int] = []
    runner = DeviceRunner(*settings_for(tiny_llama), spying(make_ops(torch.device("cpu")), ready))
    ready.clear()
    runner.execute(plan([(0, PROMPT), (0, [7])], [7], [8], [array("i", [3, 9]), array("i", [21])]))
    assert ready == [22]


def test_a_prompt_and_its_decodes_give_the_greedy_answer(runner: DeviceRunner, tiny_llama: Path) -> None:
    answer = runner.execute(plan([(0, PROMPT)], [6], [7])).token_ids
    for position in range(7, 14):
        answer += runner.execute(plan([(position, answer[-1:])], [0], [position + 1])).token_ids
    assert answer == greedy(tiny_llama, 8)


def test_a_row_may_be_sampled_several_times(runner: DeviceRunner, tiny_llama: Path) -> None:
    parts = [(0, PROMPT[:3]), (0, PROMPT)]
    tables = [array("i", [1]), TABLE]
    answer = runner.execute(plan(parts, [9, 9, 9], [7, 7, 7], tables)).token_ids
    assert answer == greedy(tiny_llama, 1) * 3


def test_a_chunk_that_is_not_the_last_samples_nothing(runner: DeviceRunner, tiny_llama: Path) -> None:
    assert runner.execute(plan([(0, PROMPT[:4])])).token_ids == []
    assert runner.execute(plan([(4, PROMPT[4:])], [2], [7])).token_ids == greedy(tiny_llama, 1)


def test_blocks_are_copied_before_they_are_read(runner: DeviceRunner, tiny_llama: Path) -> None:
    runner.execute(plan([(0, PROMPT[:-1])]))
    step = plan([(6, PROMPT[-1:])], [0], [7], [array("i", [10, 3])])
    step.forward.block_copies.append(BlockCopy(0, 11, 3))
    assert runner.execute(step).token_ids == greedy(tiny_llama, 1)


def test_a_plan_without_sequences_only_copies(runner: DeviceRunner) -> None:
    step = plan([])
    step.forward.block_copies.append(BlockCopy(0, 1, 2))
    assert runner.execute(step).token_ids == []


def test_it_uses_as_many_threads_as_the_settings_say(tiny_llama: Path) -> None:
    DeviceRunner(*settings_for(tiny_llama, threads=2))
    try:
        assert native.num_threads() == 2
    finally:
        native.set_num_threads(1)


@needs_native
def test_a_size_without_a_native_kernel_has_the_reference_compute_the_whole_model(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = DeviceRunner(*settings_for(tiny_llama, block_size=5))
    assert runner.ops.library is None
    assert "no native kernel for attention with heads of 16 elements and blocks of 5 tokens" in caplog.text
    assert runner.execute(plan([(0, PROMPT)], [6], [7])).token_ids == greedy(tiny_llama, 1)


@needs_native
def test_without_torch_it_says_what_to_install(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingTorchError, match=r"for this model: pip install '\.\[torch\]' .* blocks of 5 tokens"):
        DeviceRunner(*settings_for(tiny_llama, block_size=5))


def test_a_closed_runner_has_given_its_memory_back(runner: DeviceRunner) -> None:
    runner.close()
    with pytest.raises(AttributeError):
        runner.execute(plan([(0, PROMPT)]))
