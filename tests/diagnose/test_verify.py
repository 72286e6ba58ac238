"""The self-test finds what it is there to find, and nothing where there is nothing."""

from pathlib import Path
from typing import Any

import pytest

from penstock import cli, native
from penstock.api.request import TokenLogprob
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.cli.verify import report
from penstock.config.settings import Settings
from penstock.core.plan import StepPlan, StepResult
from penstock.diagnose.verify import Finding, SelfTest, first_difference, self_test_config
from penstock.engine.build import build_engine
from penstock.errors import ConfigError
from tests.core.fakes import FakeRunner
from tests.support import omni
from tests.support.checkpoints import write_random
from tests.support.families import LATENTS, SHAPE
from tests.support.hearing import make_hearing
from tests.support.vision import FAMILIES, make

SITUATIONS = 10


class Exact(FakeRunner):
    """Stands in for a model whose answers depend on the request alone."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        super().__init__(settings.memory.num_blocks, settings.memory.block_size, vocab=384)

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        result.logprobs = [TokenLogprob(token, -1.0 - token, ((3, -0.5),)) for token in result.token_ids]
        return result

    def close(self) -> None:
        pass


class InexactInCompany(Exact):
    """One bit of a log-probability depends on how many sequences are in the step, as with many a kernel."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if len(plan.forward.query_lens) > 4:
            result.logprobs = [TokenLogprob(token, -1.0 - token, ((3, -0.5 + 2**-50),)) for token in result.token_ids]
        return result


class WrongWhenRecomputed(Exact):
    """Chunks that begin in the middle of a prompt are computed as other tokens, as with a mask that is off."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if any(start and count > 1 for start, count in zip(plan.forward.starts, plan.forward.query_lens, strict=True)):
            result.token_ids = [(token + 1) % 384 for token in result.token_ids]
        return result


class FailsInCrowds(Exact):
    def execute(self, plan: StepPlan) -> StepResult:
        if len(plan.forward.query_lens) > 8:
            raise RuntimeError("too many")
        return super().execute(plan)


def self_test(runner: type[Exact], model: Path, **options: Any) -> SelfTest:
    config = self_test_config(model=str(model), kv_cache_memory="16MiB", threads=1, **options)
    return SelfTest(build_engine(config, make_runner=runner))


def findings(runner: type[Exact], model: Path, **options: Any) -> dict[str, Finding]:
    test = self_test(runner, model, **options)
    try:
        return {finding.situation: finding for finding in test.findings()}
    finally:
        test.close()


def test_an_exact_engine_is_clean_in_every_situation_and_each_was_reached(tiny_llama: Path) -> None:
    found = findings(Exact, tiny_llama)
    assert len(found) == SITUATIONS
    assert all(finding.clean for finding in found.values()), found
    assert found["beside 64 others"].evidence == "65 together"


def test_a_bit_of_a_logprob_that_depends_on_the_company_is_found(tiny_llama: Path) -> None:
    found = findings(InexactInCompany, tiny_llama)
    unclean = {name for name, finding in found.items() if not finding.clean}
    assert unclean == {"beside 7 others", "beside 64 others"}
    assert "log-probability of 3 is -0.4999" in str(found["beside 7 others"].difference)


def test_a_wrong_chunk_is_found_where_prompts_are_divided_or_begin_in_the_cache(tiny_llama: Path) -> None:
    found = findings(WrongWhenRecomputed, tiny_llama, max_num_batched_tokens=512)  # else not all fit a step
    for name in ("in chunks of up to 7 tokens", "in chunks of up to 61 tokens", "from the prefix cache"):
        assert found[name].difference is not None
    assert found["together, another thread count"].clean


def test_a_step_that_fails_is_a_difference(tiny_llama: Path) -> None:
    found = findings(FailsInCrowds, tiny_llama)
    assert "ended with an error: the step failed: too many" in str(found["beside 64 others"].difference)
    assert found["beside 7 others"].clean


def test_a_situation_that_the_limits_rule_out_is_not_taken_for_clean(tiny_llama: Path) -> None:
    found = findings(Exact, tiny_llama, max_num_seqs=8)
    unreached = found["beside 64 others"]
    assert (unreached.reached, unreached.difference, unreached.clean) == (False, None, False)


def test_too_short_a_context_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="needs a context of 105 tokens"):
        findings(Exact, tiny_llama, max_model_len=100)


def test_answers_that_end_early_differ_and_nan_equals_nan() -> None:
    nan = [TokenLogprob(1, float("nan"))]
    assert first_difference(([1], nan), ([1], nan)) is None
    assert first_difference(([1, 2], nan * 2), ([1], nan)) == "1 tokens, not 2"


@pytest.mark.parametrize(("runner", "code"), [(Exact, 0), (InexactInCompany, 1)])
def test_the_report_is_a_table_and_an_exit_code_of_1_on_a_difference(
    tiny_llama: Path,
    capsys: pytest.CaptureFixture[str],
    runner: type[Exact],
    code: int,
) -> None:
    assert report(self_test(runner, tiny_llama)) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + SITUATIONS + 1
    assert ("2 of 10 situations failed" in lines[-1]) == bool(code)


HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Lfm2": ({"layer_types": ["conv", "full_attention"]}, set()),
    "Qwen3_5": (HYBRID, set()),
    "Mistral": ({"sliding_window": 24}, {"preempted in a tiny pool"}),
    "Gemma3": ({"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}, set()),
    "DeepseekV3": (LATENTS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, set()),
}
"""One of each kind of model, and the situations that it cannot come into."""


@pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact across batches")
@pytest.mark.parametrize("family", [*KINDS, "Qwen3-VL", "Gemma 3", "Whisper", "Qwen2.5-Omni"])
def test_a_kind_of_model_is_clean_in_every_situation_that_it_can_come_into(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All families are judged, in more company, by `benchmarks/quality/families.py`."""
    monkeypatch.setattr("penstock.diagnose.verify.COMPANY", (1, 7))
    left_out: set[str] = set()
    if family == "Whisper":
        make_hearing(tmp_path, context=448, positions=450)
    elif family in FAMILIES:
        make(family, tmp_path)
    elif family not in KINDS:
        omni.make(family, tmp_path)
    else:
        changes, left_out = KINDS[family]
        write_random(tmp_path, family, **(SHAPE | {"num_hidden_layers": 2} | changes))
    config = self_test_config(model=str(tmp_path), threads=1, kv_cache_memory="16MiB", quantization="int4")
    test = SelfTest(build_engine(config))
    assert any(request.images for request in test.judged) == (family not in KINDS)
    try:
        found = {finding.situation: finding for finding in test.findings()}
    finally:
        test.close()
    assert all(finding.clean for finding in found.values()), found
    assert len(found) == SITUATIONS - 1 - len(left_out)
    assert not left_out & found.keys()


@pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact across batches")
@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "bfloat16"),
        ("--dtype", "bfloat16", "--quantization", "int4"),
        ("--quantization", "int8", "--kv-cache-dtype", "int8"),
    ],
)
def test_the_demo_model_is_clean(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert cli.main(["verify", "--threads", "1", *options]) == 0, capsys.readouterr().out
