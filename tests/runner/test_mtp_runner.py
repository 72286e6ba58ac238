"""The multi-token prediction head against `transformers`' layers, combined as in DeepSeek's report."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.config.engine_config import EngineConfig
from penstock.core import speculation
from penstock.core.costs import Acceptance
from penstock.core.draft_model import MTPDrafter
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.engine.drafting import make_drafters, make_speculation
from penstock.errors import CheckpointError, ConfigError, DeviceLostError
from penstock.native import library
from penstock.runner import ranks
from penstock.runner.device_runner import DeviceRunner
from penstock.runner.mtp_forward import RecordedMTP
from tests.core.fakes import make_request
from tests.support.checkpoints import write_random, write_tiny_llama
from tests.support.families import DELTA
from tests.support.families import SHAPE as FAMILY_SHAPE
from tests.support.gguf_families import write_family
from tests.support.mtp import FAMILIES, SHAPE, write_with_head
from tests.support.needs import needs_native
from tests.support.stepping import kept
from tests.support.torch_ops import TorchOps


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Expected:
    """The head in plain torch, on `transformers`' model: its last layer with other weights."""

    def __init__(self, model: Any, head: dict[str, Tensor]) -> None:
        self.model, self.eps = model, model.config.rms_norm_eps
        self.offset = float(any(name.startswith("mtp.") for name in head))
        prefix = f"(model.layers.{SHAPE['num_hidden_layers']}|mtp.layers.0|mtp)."
        self.head = {_HERE.get(name := re.sub(f"^{prefix}", "", given), name): one for given, one in head.items()}
        self.layer = copy.deepcopy(model.model.layers[-1])
        state = {name: tensor for name, tensor in self.head.items() if not name.startswith("mlp.experts.")}
        experts = getattr(self.layer.mlp, "experts", torch.nn.Identity())
        for name in dict(experts.named_parameters()):
            parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
            rows = [
                torch.cat([self.head[f"mlp.experts.{expert}.{part}.weight"] for part in parts])
                for expert in range(SHAPE["n_routed_experts"])
            ]
            state[f"mlp.experts.{name}"] = torch.stack(rows)
        known = set(self.layer.state_dict())
        assert known <= set(state)
        self.layer.load_state_dict({name: state[name] for name in known})

    @torch.no_grad()
    def guesses(self, text: list[int], count: int) -> list[int]:
        """The tokens after the one that follows `text`, whose last token the model has not computed yet."""
        model = self.model.model
        hidden = model(torch.tensor([text[:-1]])).last_hidden_state[0]
        hidden = torch.cat([torch.zeros_like(hidden[:1]), hidden])
        found: list[int] = []
        for _ in range(count):
            embedded = model.embed_tokens(torch.tensor(text + found))
            both = (self._norm("enorm", embedded), self._norm("hnorm", hidden))
            x = F.linear(torch.cat(both, -1), self.head["eh_proj.weight"])[None]
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
            angles = model.rotary_emb(x, position_ids=positions)
            made = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            made = made[0] if isinstance(made, tuple) else made
            normed = self._norm("shared_head.norm", made[0, -1:])
            found.append(int(self.model.lm_head(normed).argmax()))
            hidden = torch.cat([hidden, normed])
        return found

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.head[f"{name}.weight"] + self.offset, self.eps)


_HERE = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
"""DeepSeek's names of what Qwen's heads call otherwise."""


def engine(folder: Path, **options: Any) -> EngineCore:
    defaults = {"speculation": "mtp", "block_size": 4, "kv_cache_memory": "4MiB", "threads": 1}
    config = EngineConfig.from_options(model=str(folder), **(defaults | options))
    return build_engine(config, clock=lambda: 0.0)  # on which guesses cost nothing


def run(core: EngineCore, texts: list[list[int]], length: int) -> list[list[int]]:
    """The answers to these texts, all at once."""
    for index, text in enumerate(texts):
        core.add_request(make_request(str(index), text, length, stop_token_ids=()))
    found: dict[str, list[int]] = {str(index): [] for index in range(len(texts))}
    while core.has_work:
        for output in core.step():
            assert output.finish_reason != "error", output.error
            found[output.request_id] += output.token_ids
    return list(found.values())


TEXTS = [[(7 * place + seed) % SHAPE["vocab_size"] for place in range(length)] for seed, length in ((1, 23), (2, 6))]


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("head")
    return folder, Expected(*write_with_head(folder, request.param))


def watch_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """To which texts and their guesses, as they are made, are added."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = MTPDrafter.propose

    def watched(self: MTPDrafter, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        drafts = propose(self, wanted)
        seen.extend((list(seq.tokens), list(draft)) for (seq, _), draft in zip(wanted, drafts, strict=True))
        return drafts

    monkeypatch.setattr(MTPDrafter, "propose", watched)
    return seen


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}], ids=["whole", "chunks"])
def test_the_head_guesses_what_the_report_says_and_answers_stay_the_same(
    written: tuple[Path, Expected], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = written
    seen = watch_drafts(monkeypatch)
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)  # guesses of a random head are seldom right
    monkeypatch.setattr(Acceptance, "is_new", False)  # so the first are as long as they may be
    plain = engine(folder, speculation=None, **options)
    wanted = run(plain, TEXTS, 12)
    plain.close()
    core = engine(folder, **options)
    with TorchOps() as noted:
        assert run(core, TEXTS, 12) == wanted
    assert noted.names == [] or library() is None
    guessed = [(text, draft) for text, draft in seen if draft]
    assert len(guessed) > 8
    assert {len(draft) for _, draft in guessed} >= {1, 3}
    for text, draft in guessed:
        assert draft == expected.guesses(text, len(draft))
    assert core.stats().drafted_tokens > 0
    seen.clear()
    assert run(core, TEXTS, 12) == wanted  # from the prefix cache
    assert core.stats().prefix_hit_tokens > 0
    hits = sum(draft == expected.guesses(text, len(draft)) for text, draft in seen)
    assert hits == len(seen) > 0
    core.check_integrity()
    core.close()


def test_answers_stay_the_same_where_sequences_are_preempted(
    written: tuple[Path, Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)
    folder, _ = written
    texts = [[place % 9 for place in range(length)] for length in (20, 17, 23)]
    roomy = engine(folder, speculation=None)
    wanted = run(roomy, texts, 30)
    roomy.close()
    tiny = engine(folder)
    settings = replace(tiny.settings, memory=tiny.settings.memory.with_fewer_blocks(24))
    drafters = make_drafters(settings, tiny._draft_runner, tiny._grammars)
    tiny.restart(settings, make_speculation(settings, drafters, lambda: 0.0))
    assert run(tiny, texts, 30) == wanted
    assert tiny.stats().preemptions > 0
    assert tiny.stats().drafted_tokens > 0
    tiny.close()


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_answers_stay_the_same_in_every_precision(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)
    write_with_head(tmp_path, "Qwen3_5Moe")
    answers = []
    for kind in (None, "mtp"):
        core = engine(tmp_path, speculation=kind, **options)
        answers.append(run(core, TEXTS, 16))
        assert (core.stats().drafted_tokens > 8) is (kind == "mtp")
        core.close()
    assert answers[0] == answers[1]


def test_the_head_of_a_gguf_file_guesses_as_that_of_its_folder(
    written: tuple[Path, Expected], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)
    folder, expected = written
    seen = watch_drafts(monkeypatch)
    write_family(tmp_path / "model.gguf", folder)
    answers = []
    for path, kind in ((folder, None), (tmp_path / "model.gguf", "mtp")):
        core = engine(path, speculation=kind)
        answers.append(run(core, TEXTS, 12))
        core.close()
    assert answers[0] == answers[1]
    drafts = [(text, draft) for text, draft in seen if draft]
    assert len(drafts) > 8
    assert all(draft == expected.guesses(text, len(draft)) for text, draft in drafts)


@pytest.mark.parametrize("stored", ["Q8_0", "BF16"])
def test_the_head_of_a_gguf_file_has_types_of_its_own_and_changes_no_answer(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "linear_value_head_dim": 16}
    write_with_head(tmp_path / "hf", "Qwen3_5", **sizes)
    write_family(tmp_path / "model.gguf", tmp_path / "hf", stored, head="Q8_0")
    answers = []
    for kind in (None, "mtp"):
        core = engine(tmp_path / "model.gguf", speculation=kind)
        answers.append(run(core, TEXTS, 16))
        assert (core.stats().drafted_tokens > 8) is (kind == "mtp")
        core.close()
    assert answers[0] == answers[1]


def test_a_gguf_file_that_counts_a_head_and_does_not_hold_it_has_none(tmp_path: Path) -> None:
    write_with_head(tmp_path / "hf", "Glm4Moe")
    write_family(tmp_path / "model.gguf", tmp_path / "hf", head=None)
    engine(tmp_path / "model.gguf", speculation=None).close()
    with pytest.raises(ConfigError, match="has no multi-token prediction head"):
        engine(tmp_path / "model.gguf")


@needs_native
@pytest.mark.parametrize("family", ["DeepseekV3", "Qwen3_5Moe"])
def test_two_ranks_guess_as_one_process_does(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)
    seen = watch_drafts(monkeypatch)
    write_with_head(tmp_path, family)
    found = []
    for size in (1, 2):
        core = engine(tmp_path, tensor_parallel_size=size, threads=size)
        answers = [run(core, TEXTS, 12) for _ in range(2)]
        found.append((answers, seen[:], core.stats().accepted_tokens))
        seen.clear()
        core.close()
    assert found[0] == found[1]
    assert sum(bool(draft) for _, draft in found[0][1]) > 16


@needs_native
def test_a_step_of_the_head_that_fails_in_one_of_two_ranks_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "LEAST_GAIN", 0.0)
    write_with_head(tmp_path, "Glm4Moe")
    core = engine(tmp_path, tensor_parallel_size=2, threads=2)

    def fail(self: RecordedMTP, *step: Any) -> Tensor:
        raise ValueError("failed")

    monkeypatch.setattr(RecordedMTP, "run", fail)
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    with pytest.raises(DeviceLostError, match="a step of the head in several ranks failed: failed"):
        run(core, TEXTS, 12)
    core.close()


def test_hidden_states_are_in_the_memory_plan(written: tuple[Path, Expected]) -> None:
    core = engine(written[0])
    runner = core._runner
    assert isinstance(runner, DeviceRunner)
    assert runner.hidden is not None
    keys = sum(layer.nbytes for layer in kept(runner._cache))
    assert keys + runner.hidden.nbytes == core.settings.memory.kv_cache
    core.close()


def test_what_has_no_head_or_no_tensors_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no multi-token prediction head"):
        engine(write_tiny_llama(tmp_path / "llama"))
    write_random(tmp_path / "bare", "Glm4Moe", **(SHAPE | FAMILIES["Glm4Moe"] | {"num_nextn_predict_layers": 1}))
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.2\."):
        engine(tmp_path / "bare")
    write_random(tmp_path / "next", "Qwen3Next", **(SHAPE | FAMILIES["Qwen3Next"]))
    with pytest.raises(CheckpointError, match=r"lack mtp\."):
        engine(tmp_path / "next")
    write_random(tmp_path / "own", "Qwen3_5", **(SHAPE | FAMILIES["Qwen3_5"]))
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    own = config | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}
    (tmp_path / "own" / "config.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match="has no multi-token prediction head"):
        engine(tmp_path / "own")
    write_family(tmp_path / "next.gguf", tmp_path / "next")
    with pytest.raises(ConfigError, match="has no multi-token prediction head"):
        engine(tmp_path / "next.gguf")
    with pytest.raises(ConfigError, match="takes no speculative_model"):
        engine(tmp_path / "llama", speculative_model=str(tmp_path / "llama"))


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    for name in ("large", "small"):
        write_random(tmp_path / name, "Qwen3_5", **(FAMILY_SHAPE | DELTA))
    with pytest.raises(ConfigError, match="the draft model small has recurrent layers"):
        engine(tmp_path / "large", speculation="draft", speculative_model=str(tmp_path / "small"))
