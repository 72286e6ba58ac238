"""Every family against `transformers`: the same logits however a text is cut into steps, and the same greedy answer."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.plan import BlockCopy, NewBlocks
from penstock.errors import ConfigError
from penstock.runner.device_runner import DeviceRunner
from penstock.runner.forward import RecordedForward
from tests.kernels.versions import needs_native, recording_table
from tests.support.checkpoints import write_random
from tests.support.families import CASES, LONGROPE, MULTIMODAL, SHAPE, rope
from tests.support.reference import cut, expected, referee, texts
from tests.support.stepping import Stepper, kept, plan_of, settings_for
from tests.support.torch_ops import computed_by_torch


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "_"))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("random")
    return folder, referee(write_random(folder, family, **(SHAPE | changes)))


def test_logits_of_a_whole_prompt_equal_those_of_transformers(written: tuple[Path, Any]) -> None:
    folder, reference = written
    (text,) = texts((97,))
    logits = Stepper(folder, 1, kv_cache_memory="16MiB").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)


def test_logits_do_not_depend_on_chunks_and_neighbours(written: tuple[Path, Any]) -> None:
    folder, reference = written
    long, middle, short = texts((97, 33, 9))
    stepper = Stepper(folder, 3, kv_cache_memory="16MiB")
    pieces = {0: cut(long, [17, 1, 43, 2, 5]), 1: cut(middle, [1, 29]), 2: cut(short, [])}
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    while step := {index: piece for index, pieces_left in pieces.items() if (piece := next(pieces_left, None))}:
        for index, rows in stepper.step(step).items():
            logits[index].append(rows)
    for index, text in enumerate((long, middle, short)):
        torch.testing.assert_close(torch.cat(logits[index]), expected(reference, text), atol=2e-4, rtol=0)


def test_sixty_four_greedy_tokens_equal_those_of_transformers(written: tuple[Path, Any]) -> None:
    """Each token has the highest logit of one pass of the reference over all of them, or one within float32's rounding
    of it. By induction these are the tokens of the reference's `generate`, which would take 64 passes.
    """
    folder, reference = written
    (prompt,) = texts((21,))
    stepper = Stepper(folder, 1, kv_cache_memory="16MiB")
    tokens = [int(stepper.step({0: prompt})[0][-1].argmax())]
    while len(tokens) < 64:
        tokens.append(int(stepper.step({0: tokens[-1:]})[0][-1].argmax()))
    logits = expected(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert (logits.amax(-1) - logits[range(64), tokens]).max() < 1e-6


@needs_native
def test_its_steps_are_recorded_and_torch_computes_nothing_in_them(written: tuple[Path, Any]) -> None:
    checkpoint, settings = settings_for(written[0], kv_cache_memory="16MiB", max_num_batched_tokens=8, max_num_seqs=2)
    runner = DeviceRunner(checkpoint, settings, recording_table())
    assert isinstance(runner._forward, RecordedForward)
    groups = range(len(settings.memory.groups))

    def steps() -> None:
        for start, count in ((0, 5), (5, 1)):
            plan = plan_of([(start, list(range(count)))], [], [count - 1], [start + count])
            plan.forward.new_blocks += [NewBlocks(group, 0, 0, array("i", [1, 2])) for group in groups if not start]
            plan.forward.block_copies += [BlockCopy(group, 1, 2) for group in groups if start]
            assert runner.execute(plan).token_ids[0] is not None

    assert computed_by_torch(steps) == []


def test_bfloat16_weights_load_as_they_are_and_compute_close_by(tmp_path: Path) -> None:
    reference = write_random(tmp_path, "Qwen3", dtype="bfloat16", **(SHAPE | {"head_dim": 16}))
    (text,) = texts((40,))
    stepper = Stepper(tmp_path, 1)
    assert stepper.model.embedding(torch.tensor([0])).dtype == torch.bfloat16
    assert kept(stepper.cache)[0].dtype == torch.bfloat16
    exact = expected(reference.float(), text)
    logits = stepper.step({0: text})[0]
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < 0.02 * exact.abs().max()


def test_float32_weights_run_in_bfloat16_when_asked(tmp_path: Path) -> None:
    reference = write_random(tmp_path, "Llama", **SHAPE)
    (text,) = texts((40,))
    exact = expected(reference, text)
    logits = Stepper(tmp_path, 1, dtype="bfloat16").step({0: text})[0]
    assert (logits - exact).abs().mean() < 0.02 * exact.abs().max()


def test_a_cache_in_bfloat16_serves_a_float32_model(tmp_path: Path) -> None:
    reference = write_random(tmp_path, "Llama", **SHAPE)
    (text,) = texts((40,))
    exact = expected(reference, text)
    stepper = Stepper(tmp_path, 1, kv_cache_dtype="bfloat16")
    logits = torch.cat([stepper.step({0: piece})[0] for piece in cut(text, [30])])
    assert (logits - exact).abs().mean() < 0.02 * exact.abs().max()


def test_longrope_has_frequencies_for_short_texts_and_for_long_ones(tmp_path: Path) -> None:
    reference = write_random(tmp_path, "Phi3", **(SHAPE | LONGROPE | {"original_max_position_embeddings": 64}))
    short, long = texts((60, 97))
    logits = Stepper(tmp_path, 1, max_model_len=64).step({0: short})[0]
    torch.testing.assert_close(logits, expected(reference, short), atol=2e-4, rtol=0)
    logits = Stepper(tmp_path, 1).step({0: long})[0]
    torch.testing.assert_close(logits, expected(reference, long), atol=2e-4, rtol=0)


def test_phimoe_has_scales_for_short_texts_and_for_long_ones(tmp_path: Path) -> None:
    factors = [1.0 + 0.3 * i for i in range(6)]
    given = rope(
        "longrope",
        short_factor=factors,
        long_factor=factors,
        short_mscale=1.2,
        long_mscale=1.6,
        original_max_position_embeddings=64,
    )
    config = SHAPE | given | {"num_local_experts": 4, "num_experts_per_tok": 2}
    reference = write_random(tmp_path, "Phimoe", **config)
    config_file = tmp_path / "config.json"
    config_file.write_text(config_file.read_text().replace("Phimoe", "PhiMoE"))  # as the published files have it
    short, long = texts((60, 97))
    logits = Stepper(tmp_path, 1, max_model_len=64).step({0: short})[0]
    torch.testing.assert_close(logits, expected(reference, short), atol=2e-4, rtol=0)
    logits = Stepper(tmp_path, 1).step({0: long})[0]
    torch.testing.assert_close(logits, expected(reference, long), atol=2e-4, rtol=0)


def test_a_context_in_which_an_indexer_would_choose_keys_is_refused_by_name(tmp_path: Path) -> None:
    family, changes = CASES["deepseek v3.2"]
    write_random(tmp_path, family, **(SHAPE | changes))
    assert settings_for(tmp_path)[1].max_model_len == 200
    with pytest.raises(ConfigError, match="from 1 to 200, its index_topk, as its indexer for longer texts"):
        settings_for(tmp_path, max_model_len=201)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_of_a_multimodal_checkpoint_the_text_model_is_computed(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family, config = MULTIMODAL[name]
    reference = referee(write_random(tmp_path, family, **config))
    (text,) = texts((60,))
    logits = Stepper(tmp_path, 1, kv_cache_memory="16MiB").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)
    assert "settings are unknown" not in caplog.text
