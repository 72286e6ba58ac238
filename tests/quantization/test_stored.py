"""Quantized checkpoints: every weight arrives as it was stored, and what cannot be read so is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.tables import make_ops
from penstock.layers.attention import Attention
from penstock.layers.mlp import GatedMLP
from penstock.models.decoder import Decoder
from penstock.models.registry import load_model, read_facts
from penstock.quantization.scheme import HINT
from tests.quantization.stored import (
    AUTO_ROUND_CONFIG,
    AWQ_CONFIG,
    GPTQ_CONFIG,
    Map,
    auto_round,
    auto_round_zeros,
    awq,
    compressed_config,
    gptq,
    gptq_symmetric,
    gptq_v2,
    gptq_v2_symmetric,
    packed,
    packed_symmetric,
    write_int4,
    write_int8,
)
from tests.support.checkpoints import write_random
from tests.support.families import CASES, SHAPE
from tests.support.stepping import settings_for

GROUPS_OF_32 = {"num_bits": 4, "strategy": "group", "group_size": 32}
GROUPED = {"num_bits": 4, "strategy": "group", "group_size": 128}
ROWS = {"num_bits": 4, "strategy": "channel"}
W8A8 = {"num_bits": 8, "strategy": "channel"}
INT4 = {
    "gptq": (gptq, GPTQ_CONFIG, 1),
    "gptq, whole rows": (gptq, GPTQ_CONFIG | {"group_size": -1}, 0),
    "gptq_v2": (gptq_v2, GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"}, 1),
    "gptq, groups of 32": (gptq, GPTQ_CONFIG | {"group_size": 32}, 4),
    "gptq, symmetric": (gptq_symmetric, GPTQ_CONFIG | {"sym": True}, 1),
    "gptq_v2, symmetric": (gptq_v2_symmetric, GPTQ_CONFIG | {"sym": True, "checkpoint_format": "gptq_v2"}, 1),
    "auto-round": (auto_round, AUTO_ROUND_CONFIG, 1),
    "auto-round, symmetric": (gptq_symmetric, AUTO_ROUND_CONFIG | {"sym": True}, 1),
    "auto-round, own zeros": (auto_round_zeros, AUTO_ROUND_CONFIG | {"packing_format": "auto_round"}, 1),
    "auto-round, awq": (awq, AUTO_ROUND_CONFIG | {"packing_format": "auto_round:auto_awq"}, 1),
    "awq": (awq, AWQ_CONFIG, 1),
    "awq, groups of 64": (awq, AWQ_CONFIG | {"group_size": 64}, 2),
    "packed, groups of 32": (packed, compressed_config("pack-quantized", **GROUPS_OF_32, symmetric=False), 4),
    "packed": (packed_symmetric, compressed_config("pack-quantized", **GROUPED), 1),
    "packed, whole rows": (packed_symmetric, compressed_config("pack-quantized", **ROWS), 0),
    "packed, with zeros": (packed, compressed_config("pack-quantized", **GROUPED, symmetric=False), 1),
}


def load(folder: Path) -> Decoder:
    checkpoint, settings = settings_for(folder)
    model = load_model(checkpoint, settings, make_ops(torch.device("cpu")))
    assert isinstance(model, Decoder)
    return model


def rows_of(model: Decoder, name: str, maps: dict[str, Map]) -> Tensor:
    """The weight of one map of the checkpoint, as the model has it."""
    block, linear = name.rsplit(".", 1)
    index = block.split(".")[2]
    layer = model.layers[int(index)]
    attention, mlp = layer._mixer, layer._feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(mlp, GatedMLP)
    for part, names in (
        (attention.qkv, ("q_proj", "k_proj", "v_proj")),
        (attention.output, ("o_proj",)),
        (mlp.gate_up, ("gate_proj", "up_proj")),
        (mlp.down, ("down_proj",)),
    ):
        if linear in names:
            sizes = [len(maps[f"{block}.{name}"].q) for name in names]
            first = sum(sizes[: names.index(linear)])
            return part.weight.lookup(torch.arange(first, first + sizes[names.index(linear)]))
    raise AssertionError(name)


def check(folder: Path, maps: dict[str, Map]) -> None:
    model = load(folder)
    assert len(maps) == 14
    for name, stored in maps.items():
        torch.testing.assert_close(rows_of(model, name, maps), stored.weight(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("form", "config", "groups"), INT4.values(), ids=INT4.keys())
def test_weights_of_4_bits_arrive_as_they_were_stored(
    tmp_path: Path, form: Callable[[Map], dict[str, Tensor]], config: dict[str, Any], groups: int
) -> None:
    check(tmp_path, write_int4(tmp_path, form, config, groups))


@pytest.mark.parametrize(
    ("form", "status", "strategy"),
    [
        ("int-quantized", "compressed", "channel"),
        ("int-quantized", "frozen", "channel"),
        ("naive-quantized", "compressed", "channel"),
        ("int-quantized", "compressed", "tensor"),
    ],
)
def test_weights_of_8_bits_arrive_as_they_were_stored(tmp_path: Path, form: str, status: str, strategy: str) -> None:
    config = compressed_config(form, **W8A8 | {"strategy": strategy}) | {"quantization_status": status}
    config = changed(config, num_bits=8, type="int", dynamic=False, symmetric=False, strategy="tensor")
    check(tmp_path, write_int8(tmp_path, config, per_tensor=strategy == "tensor"))


KEPT = "model.layers.1.mlp"
NOT_ALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "compressed-tensors": (packed_symmetric, compressed_config("pack-quantized", **GROUPED) | {"ignore": [KEPT]}),
    "awq": (awq, AWQ_CONFIG | {"modules_to_not_convert": ["layers.1.mlp"]}),
    "gptq": (gptq, GPTQ_CONFIG | {"dynamic": {rf"-:{KEPT}.*": {}}}),
    "gptq, listed": (
        gptq,
        GPTQ_CONFIG
        | {
            "modules_in_block_to_quantize": [
                ["self_attn"],
                *([f"layers.0.mlp.{p}_proj"] for p in ("gate", "up", "down")),
            ]
        },
    ),
    "auto-round": (
        auto_round,
        AUTO_ROUND_CONFIG | {"extra_config": {f"{KEPT}.{p}_proj": {"bits": 16} for p in ("gate", "up", "down")}},
    ),
    "auto-round, by expression": (
        auto_round,
        AUTO_ROUND_CONFIG | {"extra_config": {r".*layers\.1\.mlp.*": {"bits": 16, "data_type": "float"}}},
    ),
}


@pytest.mark.parametrize(("form", "config"), NOT_ALL.values(), ids=NOT_ALL)
def test_layers_of_integer_checkpoints_that_are_not_quantized_are_read_as_floating_point(
    tmp_path: Path, form: Callable[[Map], dict[str, Tensor]], config: dict[str, Any]
) -> None:
    maps = write_int4(tmp_path, form, config)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: maps.pop(name).weight() for name in list(maps) if name.startswith(KEPT)}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{KEPT}.")}
    save_file(tensors | {f"{name}.weight": weight for name, weight in kept.items()}, tmp_path / "model.safetensors")
    model = load(tmp_path)
    for name, stored in maps.items():
        torch.testing.assert_close(rows_of(model, name, maps), stored.weight(), rtol=1e-6, atol=0.0)
    down = model.layers[1]._feed_forward
    assert isinstance(down, GatedMLP)
    assert torch.equal(down.down.weight.lookup(torch.arange(128)), kept[f"{KEPT}.down_proj"])


def test_settings_of_quantization_that_are_unknown_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG | {"adapter": {"rank": 8}, "damp_percent": 0.1})
    load(tmp_path)
    (line,) = (message for message in caplog.messages if "unknown and have no effect" in message)
    assert line.endswith("quantization_config.adapter")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_routers_of_quantized_mixtures_are_read_as_floating_point(tmp_path: Path, method: str) -> None:
    family, changes = CASES["qwen3 moe, a layer without experts"]
    write_random(tmp_path, family, **SHAPE | changes)
    settings = json.loads((tmp_path / "config.json").read_text())
    config = {"gptq": GPTQ_CONFIG, "awq": AWQ_CONFIG}[method]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    formats = {
        matrix.name: matrix.format.name
        for matrix in read_facts(open_checkpoint(str(tmp_path)), with_weights=False).matrices
    }
    assert formats["model.layers.0.mlp.gate"] == "float"
    assert formats["model.layers.0.mlp.experts.0.up_proj"] != "float"


def test_tensors_that_belong_together_may_lie_in_different_files(tmp_path: Path) -> None:
    maps = write_int4(tmp_path, gptq, GPTQ_CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: "2.safetensors" if name.endswith("scales") else "1.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check(tmp_path, maps)


def test_a_quantized_checkpoint_answers_and_its_facts_name_the_format(tmp_path: Path) -> None:
    write_int4(tmp_path, awq, AWQ_CONFIG)
    facts = read_facts(open_checkpoint(str(tmp_path)))
    assert facts.stored_format == "awq"
    with LLM(str(tmp_path), kv_cache_memory="8MiB", threads=1) as llm:
        answer = llm.generate("hello", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(answer[0].outputs[0].token_ids) == 4


def test_it_is_not_rounded_again(tmp_path: Path) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG)
    with pytest.raises(ConfigError, match=r"already quantized \(gptq\)"):
        settings_for(tmp_path, quantization="int8")


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with other settings for activations."""
    group = config["config_groups"]["group_0"] | {"input_activations": weights}
    return config | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' .* supported: 'gptq', 'awq', 'auto-round', 'compr"),
        ({}, "lacks 'quant_method'"),
        (AUTO_ROUND_CONFIG | {"packing_format": "auto_round:mlx"}, "packing_format 'auto_round:mlx'"),
        (AUTO_ROUND_CONFIG | {"extra_config": {"a": {"bits": 8}}}, "extra_config of 'a'"),
        (GPTQ_CONFIG | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic '\\+:"),
        (GPTQ_CONFIG | {"dynamic": {"-:(a+)+b": {}}}, "dynamic 're:"),
        (GPTQ_CONFIG | {"lm_head": True}, "lm_head True"),
        (GPTQ_CONFIG | {"bits": 3}, "bits 3 .* supported: 4"),
        ({"quant_method": "gptq"}, "lacks 'bits'"),
        (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ_CONFIG | {"group_size": 0}, "group_size 0 .* 'multiples of 32'"),
        (AWQ_CONFIG | {"version": "gemv"}, "version 'gemv' .* supported: 'gemm'"),
        (compressed_config("pack-quantized", num_bits=8, strategy="channel"), "num_bits 8"),
        (compressed_config("nvfp4-pack-quantized", **W8A8), "format 'nvfp4-pack-quantized'"),
        (compressed_config("int-quantized", num_bits=8, strategy="group"), "strategy 'group'"),
        (compressed_config("int-quantized", **W8A8, symmetric=False), "symmetric False"),
        (compressed_config("pack-quantized", **GROUPED, actorder="group"), "actorder 'group'"),
        (compressed_config("int-quantized", **W8A8) | {"config_groups": {}}, "0 config_groups"),
        (compressed_config("int-quantized", **W8A8) | {"transform_config": {"R1": {}}}, "transform_config"),
        (compressed_config("naive-quantized", num_bits=4, strategy="channel"), "num_bits 4"),
        (compressed_config("int-quantized", **W8A8) | {"quantization_status": "calibration"}, "'calibration'"),
    ],
)
def test_a_scheme_that_we_do_not_read_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, config: Any, words: str
) -> None:
    settings = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=words):
        read_facts(open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ({"embeddings": "q8_0"}, "embeddings 'q8_0' .* supported: 'int8', 'int6', 'int5', 'int4'$"),
        ({"embeddings": "float"}, "embeddings 'float' "),
        ({"layers": {".*": "int8"}}, "must map at most 64 name patterns to int4 or int6"),
        ({"layers": {"a": ["int4"], ".*": "int4"}}, "must map at most 64 name patterns to int4 or int6"),
        ({"layers": {f"a{n}": "int4" for n in range(64)} | {".*": "int4"}}, "must map at most 64 name patterns"),
        ({"layers": {"(([a-z_.0-9])+)+!": "int4", ".*": "int4"}}, r"pattern .*\)\+!' .* supported: 'expressions of"),
        ({"layers": {".*.*.*.*.*x": "int4", ".*": "int4"}}, "pattern .* is not supported"),
        ({"layers": {"(": "int4", ".*": "int4"}}, r"pattern of layers in penstock_quantization '\(' "),
    ],
)
def test_a_recipe_that_we_do_not_write_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, hint: dict[str, Any], words: str
) -> None:
    settings = json.loads((tiny_llama / "config.json").read_text())
    config = compressed_config("pack-quantized", **GROUPS_OF_32)
    recipe = {"layers": {".*": "int4"}, "embeddings": "int5"} | hint
    settings |= {"quantization_config": config, HINT: recipe}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=words):
        read_facts(open_checkpoint(str(tmp_path)))


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("mlp.down_proj.g_idx", (torch.arange(256) // 128).flip(0).int(), r"down_proj\.g_idx in .*\(desc_act\)"),
        ("mlp.down_proj.qweight", torch.zeros(32, 128), r"down_proj\.qweight in .* has the type float32, not int32"),
        ("mlp.down_proj.scales", torch.full((2, 128), torch.nan), r"down_proj\.scales in .* not finite"),
        ("mlp.down_proj.qzeros", None, r"lack .*down_proj\.qzeros"),
        ("mlp.down_proj.qzeros", torch.zeros(2, 8, dtype=torch.int32), r"shape \[2, 8\]; .* \[2, 16\]"),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path: Path, name: str, tensor: Tensor | None, words: str) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG)
    rewrite(tmp_path, f"model.layers.1.{name}", tensor)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_groups_that_the_kernels_do_not_have_are_refused(tmp_path: Path) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG | {"group_size": 16}, groups=8)
    with pytest.raises(CheckpointError, match=r"groups of 16 columns .* multiples of 32 columns"):
        load(tmp_path)


def test_a_shape_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    write_int4(tmp_path, packed_symmetric, compressed_config("pack-quantized", **GROUPED))
    rewrite(tmp_path, "model.layers.0.mlp.up_proj.weight_shape", torch.tensor([128, 256]))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_shape in .* is not \[256, 128\]"):
        load(tmp_path)
