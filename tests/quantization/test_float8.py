"""FP8 and MXFP4 checkpoints: every weight arrives as it was stored, bit for bit; other variants are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.weight_formats import FORMATS
from penstock.errors import CheckpointError
from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.linear.quantized import dequantize
from penstock.kernels.ops import native_ops
from penstock.kernels.tables import make_ops
from penstock.models.decoder import Decoder
from penstock.models.registry import load_model, read_facts
from penstock.quantization.scheme import Float8Scheme, MXFP4Scheme, QuantizedModules
from penstock.quantization.stored_float8 import float8_rows
from penstock.quantization.stored_mxfp4 import mxfp4_rows
from tests.kernels.versions import LIBRARY, REFERENCE
from tests.quantization.stored import compressed_config, write_layers
from tests.support.families import SHAPE
from tests.support.stepping import settings_for

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CPU = torch.device("cpu")
TABLES = [REFERENCE, *([native_ops(LIBRARY)] if LIBRARY else [])]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True, "strategy": "token"}


STATIC = {**DYNAMIC, "dynamic": False, "strategy": "tensor"}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    config = compressed_config("float-quantized", num_bits=8, type="float", strategy=strategy, **more)
    config["config_groups"]["group_0"]["input_activations"] = DYNAMIC
    return config


def static_floats(**more: Any) -> dict[str, Any]:
    config = floats("tensor") | more
    config["config_groups"]["group_0"]["input_activations"] = STATIC
    return config


def targeted(*targets: str) -> dict[str, Any]:
    config = floats("channel")
    config["config_groups"]["group_0"]["targets"] = list(targets)
    return config


ASYMMETRIC = floats("channel") | {"format": "naive-quantized"}
ASYMMETRIC["config_groups"]["group_0"]["input_activations"] = {**STATIC, "symmetric": False}
MODELOPT = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.mlp.router*"]}

FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8, blocks": ("block", "weight_scale_inv", FP8),
    "fp8, a tensor": ("scalar", "weight_scale_inv", FP8 | {"weight_block_size": None}),
    "fbgemm_fp8": ("row", "weight_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "compressed-tensors, a tensor": ("tensor", "weight_scale", floats("tensor")),
    "compressed-tensors, static": ("tensor", "weight_scale", static_floats(quantization_status="frozen")),
    "compressed-tensors, static, with the cache": (
        *("tensor", "weight_scale"),
        static_floats(kv_cache_scheme={"num_bits": 8, "type": "float"}),
    ),
    "AutoFP8, static": (
        *("scalar", "weight_scale"),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8, static": (
        *("scalar", "weight_scale_inv"),
        FP8 | {"weight_block_size": None, "activation_scheme": "static"},
    ),
    "compressed-tensors, rows": ("row", "weight_scale", floats("channel")),
    "compressed-tensors, naive and asymmetric": ("row", "weight_scale", ASYMMETRIC),
    "modelopt": (
        *("scalar", "weight_scale"),
        {"quant_method": "modelopt", **MODELOPT, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ),
    "modelopt, static, nested": (
        *("scalar", "weight_scale"),
        {"quant_method": "modelopt", "quantization": MODELOPT | {"kv_cache_quant_algo": "FP8"}},
    ),
    "compressed-tensors, blocks": ("block", "weight_scale", floats("block", block_structure=[128, 128])),
}


def random_float8(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Any bits but those of what is no number."""
    bits = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    bits[bits & 127 == 127] = 1
    return bits.view(torch.float8_e4m3fn)


def random_scales(per: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    shape = {"tensor": (1,), "scalar": (), "row": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[per]
    return torch.rand(shape, generator=generator) * 0.02


def product(values: Tensor, scales: Tensor) -> Tensor:
    """As `transformers` dequantizes, in float32."""
    if scales.ndim == 2 and (scales.shape[1] > 1 or len(scales) < len(values)):  # by blocks of 128
        scales = scales.repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]
    return values.float() * scales.float()


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(129, 400),
    per=st.sampled_from(["tensor", "row", "block"]),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
def test_fp8_is_held_exactly(rows: int, columns: int, per: Any, wide: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, scales = random_float8(rows, columns, generator), random_scales(per, rows, columns, generator)
    held = float8_rows(array_of(values), array_of(scales), Float8Scheme(per, "weight_scale"))
    wanted = product(values, scales)
    assert torch.equal(tensor_of(dequantize(held, FORMATS["fp8"])), wanted)
    for table in TABLES:
        dtype = torch.float32 if wide else torch.bfloat16
        weight = table.new_weight(rows, columns, FORMATS["fp8"], gated=False, dtype=dtype, device=CPU)
        weight.load(0, held)
        assert torch.equal(weight.lookup(torch.arange(rows)), wanted.to(dtype))


def mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """By the specification: values uint8 [rows, columns / 2], scales uint8 [rows, columns / 32]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    pairs = torch.stack((values & 15, values >> 4), -1).flatten(1)
    return torch.ldexp(table[pairs.int()], scales.int().repeat_interleave(32, 1) - 127)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 90), groups=st.integers(1, 9), seed=st.integers(0, 999))
def test_mxfp4_is_held_exactly(rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 250, (rows, groups), dtype=torch.uint8, generator=generator)
    wanted = mxfp4(values.flatten(1), scales)
    held = mxfp4_rows(array_of(values), array_of(scales))
    assert torch.equal(tensor_of(dequantize(held, FORMATS["mxfp4"])), wanted)
    for table in TABLES:
        weight = table.new_weight(rows, 32 * groups, FORMATS["mxfp4"], gated=False, dtype=torch.float32, device=CPU)
        weight.load(0, held)
        assert torch.equal(weight.lookup(torch.arange(rows)), wanted)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (2, 6, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, (2, 6, 4), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(values, scales, dtype=torch.bfloat16)  # [experts, columns, rows]
    for expert in range(2):
        held = mxfp4_rows(array_of(values[expert]), array_of(scales[expert]))
        ours = tensor_of(dequantize(held, FORMATS["mxfp4"]))
        assert torch.equal(ours, theirs[expert].T.float())


@pytest.mark.parametrize("form", FORMS)
def test_fp8_checkpoints_are_read_as_they_are(form: str, tmp_path: Path) -> None:
    per, scale_name, config = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    wanted: dict[str, Tensor] = {}

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        values, scales = random_float8(*shape, generator), random_scales(per, *shape, generator)
        wanted[name] = product(values, scales)
        kinds = ("input_scale", "activation_scale", "output_scale", "k_scale", "input_zero_point", "v_zero_point")
        others = kinds if "static" in form or "asymmetric" in form else ()
        return {"weight": values, scale_name: scales, **{one: torch.tensor(0.5) for one in others}}

    write_layers(tmp_path, config, store)
    _check_layers(tmp_path, wanted)
    assert read_facts(open_checkpoint(str(tmp_path))).stored_format == "FP8"
    with LLM(str(tmp_path), kv_cache_memory="8MiB") as llm:
        assert llm.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids


def test_mxfp4_of_compressed_tensors_is_read_as_it_is(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    generator = torch.Generator().manual_seed(0)
    wanted: dict[str, Tensor] = {}

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        values = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 122, (shape[0], shape[1] // 32), dtype=torch.uint8, generator=generator)
        wanted[name] = mxfp4(values, scales)
        return {"weight_packed": values, "weight_scale": scales}

    write_layers(tmp_path, compressed_config("mxfp4-pack-quantized", **weights), store)
    _check_layers(tmp_path, wanted)


def load(folder: Path) -> Decoder:
    checkpoint, chosen = settings_for(folder)
    return load_model(checkpoint, chosen, make_ops(CPU))


def _check_layers(folder: Path, wanted: dict[str, Tensor]) -> None:
    model: Any = load(folder)
    for index, layer in enumerate(model.layers):
        down = layer._feed_forward.down.weight
        held = down.lookup(torch.arange(down.rows))
        assert torch.equal(held, wanted[f"model.layers.{index}.mlp.down_proj"].to(held.dtype))


def test_a_file_of_modelopt_beside_config_json_is_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted: dict[str, Tensor] = {}

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        values, scales = random_float8(*shape, generator), random_scales("scalar", *shape, generator)
        wanted[name] = product(values, scales)
        return {"weight": values, "weight_scale": scales, "input_scale": torch.tensor(0.5)}

    write_layers(tmp_path, {}, store)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": MODELOPT})
    )
    _check_layers(tmp_path, wanted)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_facts(open_checkpoint(str(tmp_path)), with_weights=False).stored_format is None


def test_quantization_that_a_multimodal_checkpoint_states_for_its_text_is_read(tmp_path: Path) -> None:
    text = SHAPE | {"model_type": "gemma3_text", "head_dim": 16, "quantization_config": FP8, "sliding_window": 8}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_facts(open_checkpoint(str(tmp_path)), with_weights=False).stored_format == "FP8"


@pytest.mark.parametrize("targets", [["re:.*mlp.*"], ["re:.*\\.mlp\\.(gate|up|down)_proj$"], "names"])
def test_layers_that_are_no_targets_are_read_as_floating_point(targets: list[str] | str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    named = [f"model.layers.{layer}.mlp.{one}_proj" for layer in range(2) for one in ("gate", "up", "down")]
    wanted: dict[str, Tensor] = {}

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        if ".mlp." not in name:
            return {"weight": torch.zeros(shape)}
        values, scales = random_float8(*shape, generator), random_scales("row", *shape, generator)
        wanted[name] = product(values, scales)
        return {"weight": values, "weight_scale": scales}

    write_layers(tmp_path, targeted(*(named if targets == "names" else targets)), store)
    formats = {matrix.name: matrix.format.name for matrix in read_facts(open_checkpoint(str(tmp_path))).matrices}
    assert {name for name, format in formats.items() if format == "fp8"} == set(named)
    _check_layers(tmp_path, wanted)


def test_names_with_a_multimodal_checkpoints_prefixes_count() -> None:
    prefixes = (("model.language_model.", "model."), ("language_model.model.", "model."))
    for listed in ("model.language_model.layers.0.mlp", "language_model.model.layers.0.mlp"):
        modules = QuantizedModules(None, re.compile(rf"{re.escape(listed)}(\..*)?\Z"), prefixes)
        assert not modules.has("model.layers.0.mlp.up_proj")
        assert modules.has("model.layers.1.mlp.up_proj")


@pytest.mark.parametrize("listed", ["model.layers.*.mlp", "re:.*mlp.*", "model.layers.0.mlp.down_proj"])
def test_layers_that_the_config_excludes_are_read_as_floating_point(listed: str, tmp_path: Path) -> None:
    key = "ignore" if listed.startswith("re:") else "modules_to_not_convert"
    config = floats("channel") | {"ignore": [listed]} if key == "ignore" else FP8 | {key: ["lm_head", listed]}
    per, scale_name = ("row", "weight_scale") if key == "ignore" else ("block", "weight_scale_inv")
    generator = torch.Generator().manual_seed(0)

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        one = listed.endswith("down_proj")
        if (name == listed) if one else (".mlp." in name):
            return {"weight": torch.zeros(shape)}
        return {"weight": random_float8(*shape, generator), scale_name: random_scales(per, *shape, generator)}

    write_layers(tmp_path, config, store)
    checkpoint = open_checkpoint(str(tmp_path))
    formats = {matrix.name: matrix.format.name for matrix in read_facts(checkpoint).matrices}
    assert formats["model.layers.0.mlp.down_proj"] == "float"
    assert formats["model.layers.0.self_attn.q_proj"] == "fp8"
    load(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "e5m2": (FP8 | {"fmt": "e5m2"}, "e5m2"),
    "other blocks": (FP8 | {"weight_block_size": [64, 64]}, "64"),
    "int8 activations": (
        floats("channel")
        | {
            "config_groups": {
                "g": {**floats("channel")["config_groups"]["group_0"], "input_activations": {"type": "int"}}
            }
        },
        "int",
    ),
    "nvfp4": (compressed_config("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4-pack-quantized"),
    "groups": (floats("group", group_size=64), "group"),
    "a slow pattern": (floats("channel") | {"ignore": ["re:(a+)+b"]}, "(a+)+b"),
    "no list of names": (FP8 | {"modules_to_not_convert": [3]}, "modules_to_not_convert"),
    "modelopt without FP8": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    "a target that is no linear layer": (targeted("Embedding"), "targets 'Embedding'"),
    "a slow target": (targeted("re:(a+)+b"), "(a+)+b"),
    "sparse": (floats("tensor") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, named = REFUSED[case]
    write_layers(tmp_path, config, lambda name, shape: {"weight": torch.zeros(shape)})
    with pytest.raises(CheckpointError) as caught:
        read_facts(open_checkpoint(str(tmp_path)))
    assert named in str(caught.value)


def test_weights_and_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        scales = random_scales("block", *shape, generator)
        return {"weight": random_float8(*shape, generator), "weight_scale_inv": scales}

    write_layers(tmp_path, FP8, store)
    good = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    spoiled = good[f"{name}.weight"].clone()
    spoiled.view(torch.uint8)[3, 5] = 0xFF
    for part, tensor in (
        ("weight", spoiled),
        ("weight_scale_inv", torch.full_like(good[f"{name}.weight_scale_inv"], torch.inf)),
        ("weight", good[f"{name}.weight"].to(torch.float8_e5m2)),
    ):
        save_file(good | {f"{name}.{part}": tensor}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path)
    with pytest.raises(CheckpointError, match="scales that are NaN"):
        mxfp4_rows(np.zeros((1, 1, 16), np.uint8), np.full((1, 1), 255, np.uint8))


def test_the_experts_of_gpt_oss_alone_are_mxfp4() -> None:
    scheme = MXFP4Scheme("blocks")
    assert scheme.format_of("model.layers.0.mlp.router").name == "float"
    assert scheme.format_of("model.embed_tokens").name == "float"
    assert scheme.format_of("model.layers.0.mlp.experts.gate_up_proj").name == "mxfp4"
