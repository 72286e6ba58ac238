"""Latents, which are kept once, and the matrix from them to the keys and values of heads, in any stored form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.weight_formats import FLOAT, FORMATS
from penstock.layers.latent import LatentAttention
from tests.support.checkpoints import write_random
from tests.support.families import LATENTS, SHAPE
from tests.support.reference import expected, texts
from tests.support.stepping import Stepper, kept, settings_for

CONFIG: dict[str, Any] = SHAPE | LATENTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3}


@pytest.mark.parametrize("block_size", [4, 5], ids=["native layout", "the reference's layout"])
@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 32 * 4), ("bfloat16", 32 * 2), ("int8", 32 + 4)])
def test_of_each_token_a_layer_keeps_one_latent_and_the_rotated_part_of_the_key(
    tmp_path: Path, block_size: int, dtype: str, bytes_each: int
) -> None:
    write_random(tmp_path, "DeepseekV3", **CONFIG)
    plan = settings_for(tmp_path, block_size=block_size, kv_cache_dtype=dtype)[1].memory
    stepper = Stepper(tmp_path, 1, block_size=block_size, kv_cache_dtype=dtype)
    assert plan.kv_cache == 3 * plan.num_tokens * bytes_each
    assert sum(layer.nbytes for layer in kept(stepper.cache)) == plan.kv_cache


def head_maps(stepper: Stepper) -> list[Any]:
    mixers = [layer._mixer for layer in stepper.model.layers]
    assert all(isinstance(mixer, LatentAttention) for mixer in mixers)
    return [weight for mixer in mixers for weight in (*mixer._heads.keys, *mixer._heads.values)]


@pytest.mark.parametrize(("recipe", "format", "tolerance"), [("int8", "int8", 0.02), ("int4", "int6", 0.2)])
def test_it_is_rounded_with_the_others(tmp_path: Path, recipe: str, format: str, tolerance: float) -> None:
    reference = write_random(tmp_path, "DeepseekV3", **CONFIG)
    stepper = Stepper(tmp_path, 1, quantization=recipe)
    assert {weight.format for weight in head_maps(stepper)} == {FORMATS[format]}
    (text,) = texts((40,))
    exact = expected(reference, text)
    assert (stepper.step({0: text})[0] - exact).abs().mean() < tolerance * exact.abs().max()


def test_one_that_is_stored_in_eight_bits_is_read(tmp_path: Path) -> None:
    reference = write_random(tmp_path, "DeepseekV3", **CONFIG)
    weights = load_file(tmp_path / "model.safetensors")
    names = [name for name in weights if name.endswith("kv_b_proj.weight")]
    for name in names:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = scale.view(1, 1)
        layer = reference.model.layers[int(name.split(".")[2])]
        layer.self_attn.kv_b_proj.weight.data = weights[name].float() * scale
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    others = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "mlp", "lm_head"]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [f"model.layers.*.{name}" for name in others],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    stepper = Stepper(tmp_path, 1)
    assert {weight.format for weight in head_maps(stepper)} == {FLOAT}
    (text,) = texts((40,))
    torch.testing.assert_close(stepper.step({0: text})[0], expected(reference, text), atol=2e-4, rtol=0)
