"""Rounding while loading: the model answers nearly as before, in the memory that was planned."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import native
from penstock.config.recipes import RECIPES
from penstock.errors import CheckpointError
from penstock.kernels.tables import make_ops
from penstock.layers.attention import Attention
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMLP
from penstock.models.decoder import Decoder
from penstock.models.registry import load_model
from tests.support.checkpoints import write_tiny_llama
from tests.support.stepping import Stepper, settings_for

TEXT = list(range(5, 45))


def kept_bytes(weights: Path, quantization: str) -> tuple[int, int]:
    """Bytes that the model keeps, and bytes that were planned."""
    checkpoint, settings = settings_for(weights, quantization=quantization)
    model = load_model(checkpoint, settings, make_ops(torch.device("cpu")))
    assert isinstance(model, Decoder)
    maps: list[Linear] = []
    for layer in model.layers:
        attention, mlp = layer._mixer, layer._feed_forward
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GatedMLP)
        maps += [attention.qkv, attention.output, mlp.gate_up, mlp.down]
    return sum(m.weight.nbytes for m in maps), settings.memory.weights


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.1), ("int4", 0.7)])
def test_a_model_with_rounded_weights_answers_nearly_as_with_the_originals(
    tiny_llama: Path, quantization: str, error: float
) -> None:
    exact = Stepper(tiny_llama, 1).step({0: TEXT})[0]
    rounded = Stepper(tiny_llama, 1, quantization=quantization).step({0: TEXT})[0]
    assert 0 < (rounded - exact).std() / exact.std() < error


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_output_projection_is_rounded_too_whether_it_is_the_embedding_or_not(
    tmp_path: Path, tied: bool, quantization: str
) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    model = Stepper(folder, 1, quantization=quantization).model
    assert isinstance(model, Decoder)
    name = "model.embed_tokens" if tied else "lm_head"
    assert model.output.weight.format.name == RECIPES[quantization].format_of(name).name


@pytest.mark.skipif(native.library() is None, reason="the plan is for the native kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_plan_covers_what_the_weights_take(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_llama(tmp_path, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
    layers, planned = kept_bytes(folder, quantization)
    assert layers < planned


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight in .* not finite"):
        Stepper(folder, 1, quantization=quantization)
