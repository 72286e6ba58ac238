"""Mixtures of experts: how checkpoints store them, what is quantized, and the same bits however a step is made up."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.recipes import RECIPES
from penstock.errors import CheckpointError
from penstock.models.registry import load_model, read_facts
from penstock.runner.forward import EagerForward, KVCache, RecordedForward
from tests.kernels.versions import LIBRARY, needs_native, recording_table
from tests.support.checkpoints import write_random
from tests.support.families import LFM2_MOE, NEMOTRON, SHAPE
from tests.support.reference import cut, texts
from tests.support.stepping import Stepper, plan_of, settings_for

EXPERTS = 5
QWEN = SHAPE | {
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [1],
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_random(folder, "Qwen3Moe", **QWEN)
    return folder


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    (text,) = texts((33,))
    return Stepper(folder, 1, **options).step({0: text})[0]


def stack(folder: Path, target: Path, *, fused: bool) -> None:
    """Write the checkpoint with the experts of each layer in one tensor, gate and up `fused` or each in its own."""
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 2):
        above = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{above}.{expert}.{name}.weight") for expert in range(EXPERTS)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        if fused:
            tensors[f"{above}.gate_up_proj"] = torch.cat([parts.pop("gate_proj"), parts.pop("up_proj")], 1)
            tensors[f"{above}.down_proj"] = parts["down_proj"]
        else:
            tensors |= {f"{above}.{name}.weight": tensor for name, tensor in parts.items()}
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_experts_in_one_tensor_are_those_of_tensors_of_their_own(
    qwen: Path, tmp_path: Path, fused: bool, quantization: str | None
) -> None:
    stack(qwen, tmp_path / "stacked", fused=fused)
    wanted, found = (logits_of(folder, quantization=quantization) for folder in (qwen, tmp_path / "stacked"))
    assert torch.equal(found, wanted)


def test_experts_in_a_stack_and_in_tensors_of_their_own_are_refused(qwen: Path, tmp_path: Path) -> None:
    stack(qwen, tmp_path, fused=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file(tensors | {name: load_file(qwen / "model.safetensors")[name]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight, also as a part of"):
        logits_of(tmp_path)


def test_a_stack_of_another_number_of_experts_is_refused(qwen: Path, tmp_path: Path) -> None:
    stack(qwen, tmp_path, fused=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.2\.mlp\.experts\.down_proj, which this"):
        logits_of(tmp_path)


@needs_native
@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str
)
def test_answers_are_near_and_the_same_bits_in_any_company(qwen: Path, options: dict[str, Any]) -> None:
    long, short = texts((57, 20))
    exact = Stepper(qwen, 1).step({0: long})[0]
    alone = Stepper(qwen, 1, **options).step({0: long})[0]
    assert (alone - exact).abs().mean() < 0.5 * exact.abs().mean()  # 1.4: unrelated; tokens change their experts
    stepper, pieces = Stepper(qwen, 2, **options), cut(long, [7, 1, 30])
    rows = [
        stepper.step({0: piece, 1: short[:3]} if index == 1 else {0: piece})[0] for index, piece in enumerate(pieces)
    ]
    assert torch.equal(torch.cat(rows), alone)


def test_recipes_leave_routers_as_they_are_and_keep_more_of_what_experts_give() -> None:
    for recipe in RECIPES.values():
        for router in (
            "mlp.gate",
            "block_sparse_moe.gate",
            "mlp.router",
            "mlp.shared_expert_gate",
            "block_sparse_moe.router.layer",
        ):
            assert recipe.format_of(f"model.layers.0.{router}").name == "float"
    formats = [
        RECIPES["int4"].format_of(f"model.layers.0.{name}").name
        for name in ("mlp.experts.3.gate_proj", "mlp.experts.3.down_proj", "block_sparse_moe.experts.3.w2")
    ]
    assert formats == ["int4", "int5", "int5"]


@pytest.mark.parametrize("older", [False, True], ids=["", "layers by letters"])
def test_experts_without_gates_may_be_in_one_tensor(tmp_path: Path, older: bool) -> None:
    layers = ["linear_attention", "moe", "full_attention"]
    write_random(tmp_path / "apart", "NemotronH", **(SHAPE | NEMOTRON | {"layers_block_type": layers}))
    config = json.loads((tmp_path / "apart" / "config.json").read_text())
    tensors = load_file(tmp_path / "apart" / "model.safetensors")
    above = next(name for name in tensors if "experts.0.up_proj" in name).partition("0.up_proj")[0]
    for name in ("up_proj", "down_proj"):
        parts = [tensors.pop(f"{above}{expert}.{name}.weight") for expert in range(6)]
        tensors[f"{above}{name}"] = torch.stack(parts)
    if older:  # what older files say of their layers
        config["hybrid_override_pattern"] = "ME*"
        del config["layers_block_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path), logits_of(tmp_path / "apart"))


@pytest.mark.parametrize("family", ["NemotronH", "Lfm2Moe"])
def test_the_plan_counts_every_weight(tmp_path: Path, family: str) -> None:
    changes = {**NEMOTRON, "moe_latent_size": 20} if family == "NemotronH" else {**LFM2_MOE, "conv_bias": True}
    write_random(tmp_path, family, **(SHAPE | changes))
    checkpoint, _ = settings_for(tmp_path)
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert read_facts(checkpoint).num_parameters == stored


def test_the_plan_counts_every_expert(qwen: Path) -> None:
    checkpoint, _ = settings_for(qwen)
    facts = read_facts(checkpoint)
    stored = sum(tensor.numel() for tensor in load_file(qwen / "model.safetensors").values())
    assert facts.num_parameters == stored
    experts = [matrix for matrix in facts.matrices if "experts" in matrix.name]
    assert len(experts) == 2 * EXPERTS * 3
    used = QWEN["num_experts_per_tok"] / EXPERTS
    assert facts.idle_elements == sum(matrix.rows * matrix.columns for matrix in experts) * (1 - used)


@needs_native
@pytest.mark.parametrize("family", ["Qwen3Moe", "Glm4Moe", "NemotronH", "Lfm2Moe"])
def test_steps_of_a_mixture_are_recorded(tmp_path: Path, family: str) -> None:
    assert LIBRARY is not None
    shapes = {
        "Glm4Moe": {**QWEN, "n_routed_experts": 4},
        "NemotronH": {**SHAPE, **NEMOTRON, "moe_latent_size": 20},
        "Lfm2Moe": {**SHAPE, **LFM2_MOE},
    }
    write_random(tmp_path, family, **shapes.get(family, QWEN))
    checkpoint, settings = settings_for(tmp_path, dtype="bfloat16", max_num_batched_tokens=16, max_num_seqs=2)
    ops = recording_table()
    with ops.inference():
        model = load_model(checkpoint, settings, ops)
        caches = [KVCache.of_model(model.spec, settings, ops) for _ in range(2)]
        recorded = RecordedForward(model, caches[0], ops, LIBRARY, 16, 2)
        eager = EagerForward(model, caches[1], ops, "cpu")
        for start, count in ((0, 9), (9, 1), (10, 5)):
            tables = [array("i", range(8))]
            plan = plan_of([(start, list(range(start, start + count)))], tables, [count - 1]).forward
            each = [tables] * len(caches[0].groups)
            assert (recorded.run(plan, each).numpy() == eager.run(plan, each).numpy()).all()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def as_mxfp4(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks and scales of all experts, and the weights [experts, columns, rows] that they stand for."""
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator).byte()
    scales = torch.randint(122, 125, (EXPERTS, rows, columns // 32), generator=generator).byte()
    pairs = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
    weights = (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)
    return blocks, scales, weights.transpose(1, 2).contiguous()


def test_experts_of_gpt_oss_are_held_as_they_are_stored(tmp_path: Path) -> None:
    floats, stored = tmp_path / "floats", tmp_path / "stored"
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    write_random(floats, "GptOss", **(shape | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}))
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    exact = load_file(floats / "model.safetensors")
    packed, generator = dict(exact), torch.Generator().manual_seed(0)
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            del packed[full]
            packed[f"{full}_blocks"], packed[f"{full}_scales"], exact[full] = as_mxfp4(rows, columns, generator)
    stored.mkdir()
    (stored / "config.json").write_text(json.dumps(config))
    save_file(exact, floats / "model.safetensors")
    save_file(packed, stored / "model.safetensors")
    checkpoint, _ = settings_for(stored)
    formats = {matrix.format.name for matrix in read_facts(checkpoint).matrices if "experts" in matrix.name}
    assert formats == {"mxfp4"}
    found, wanted = (logits_of(folder) for folder in (stored, floats))
    assert (found - wanted).abs().mean() < 0.1 * wanted.abs().mean()  # activations are rounded


WRONG = {
    "more than there are": (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok 9 is more than the 5 experts to choose from",
    ),
    "a layer that is none": (
        {"mlp_only_layers": [7]},
        "mlp_only_layers in .* must be a list of layer indices from 0 to 2",
    ),
    "too many": ({"num_local_experts": 5000}, "has 5000 experts; at most 1024"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_cannot_be_is_refused(qwen: Path, tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    config = json.loads((qwen / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        settings_for(tmp_path)


def test_groups_that_experts_do_not_fill_are_refused(tmp_path: Path) -> None:
    write_random(tmp_path, "Glm4Moe", **QWEN, n_routed_experts=4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_group": 3}))
    with pytest.raises(CheckpointError, match="4 experts cannot be chosen from 1 of 3 groups of equal size"):
        settings_for(tmp_path)
