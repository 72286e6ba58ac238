"""Every family from a GGUF file: `transformers`' logits, and weights that are what the file stores, bit for bit."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.gguf.file import open_gguf
from penstock.errors import CheckpointError
from penstock.kernels.linear.weight import Weight
from penstock.kernels.tables import make_ops
from penstock.models.registry import load_model
from tests.support.checkpoints import write_random
from tests.support.families import LLAMA3, SHAPE, YARN, rope
from tests.support.gguf_files import write_gguf
from tests.support.reference import expected, texts
from tests.support.stepping import Stepper, settings_for

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, wide heads": ("Llama", {"head_dim": 20, "tie_word_embeddings": True}),
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": ("Llama", rope("linear", factor=3.0)),
    "llama, llama3 rope": ("Llama", LLAMA3),
    "llama, yarn rope": ("Llama", YARN),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, sliding": ("Mistral", {"sliding_window": 9}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 5.0},
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3, tied, biases": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "_"))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("random")
    return folder, write_random(folder, family, **(SHAPE | changes))


def test_logits_from_floats_equal_those_of_transformers(written: tuple[Path, Any], tmp_path: Path) -> None:
    folder, reference = written
    file = tmp_path / "model.gguf"
    write_gguf(file, folder)
    (text,) = texts((97,))
    logits = Stepper(file, 1).step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)


KINDS = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "IQ3_S",
)
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
"""Blocks of 256 divide its rows."""


class Looked:
    """A file's weights as the kernels unpack them: what `embedding` gives of each, in float32."""

    def __init__(self, file: Path) -> None:
        checkpoint, settings = settings_for(file, dtype="float32")
        self.made: list[Weight] = []
        ops = make_ops(torch.device("cpu"))
        new_weight = ops.new_weight

        def noted(*arguments: Any, **options: Any) -> Weight:
            self.made.append(new_weight(*arguments, **options))
            return self.made[-1]

        with torch.inference_mode():
            load_model(checkpoint, settings, replace(ops, new_weight=noted))
            self.rows = [weight.lookup(torch.arange(weight.rows)) for weight in self.made]


def stacked(values: dict[str, Any], *names: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(values[f"model.layers.0.{name}.weight"]) for name in names])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_quantized_matrix_is_what_the_package_unpacks_bit_for_bit(tmp_path: Path, family: str, kind: str) -> None:
    write_random(tmp_path / "hf", family, **(WIDE | {"head_dim": 64}))
    values = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", kind)
    head, table, qkv, output, gate_up, down = Looked(tmp_path / "model.gguf").rows
    assert torch.equal(head, torch.from_numpy(values["lm_head.weight"]))
    assert torch.equal(table, torch.from_numpy(values["model.embed_tokens.weight"]))
    assert torch.equal(qkv, stacked(values, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    assert torch.equal(output, stacked(values, "self_attn.o_proj"))
    assert torch.equal(gate_up, stacked(values, "mlp.gate_proj", "mlp.up_proj"))
    assert torch.equal(down, stacked(values, "mlp.down_proj"))


def mixed(name: str) -> str:
    """As Q4_K_M has it, and more of it: maps of one input in formats of their own."""
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q5_K", "ffn_down": "Q8_0", "token_embd": "Q6_K", "output": "F16"}
    return kinds.get(name.split(".")[-2], "Q4_K")


def test_each_matrix_is_of_its_own_type(tmp_path: Path) -> None:
    write_random(tmp_path / "hf", "Llama", **(WIDE | {"head_dim": 64}))
    values = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", mixed)
    looked = Looked(tmp_path / "model.gguf")
    assert {weight.format.name for weight in looked.made} == {"float", "q4_k", "q5_k", "q6_k", "q8_0"}
    unpacked = sorted((tuple(rows.shape), float(rows.double().sum())) for rows in looked.rows)
    joined = stacked(values, "self_attn.q_proj", "self_attn.k_proj")  # neighbours of one type, unlike gate and up
    apart = [torch.from_numpy(array) for name, array in values.items() if array.ndim > 1 and "q_proj" not in name]
    stored = [joined, *(rows for rows in apart if not torch.equal(rows, joined[-len(rows) :]))]
    assert len(unpacked) == len(stored)
    assert unpacked == sorted((tuple(rows.shape), float(rows.double().sum())) for rows in stored)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


@pytest.mark.parametrize(("family", "changes"), [("Llama", {}), ("Qwen3Moe", EXPERTS)])
def test_a_quantized_model_computes_what_its_weights_say(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder, file = tmp_path / "hf", tmp_path / "model.gguf"
    write_random(folder, family, **(WIDE | {"head_dim": 64} | changes))
    kinds = {"attn_v": "Q5_1", "ffn_up": "Q5_0", "ffn_down": "Q8_0", "token_embd": "Q8_0", "output": "F16"}
    kinds |= {"ffn_up_exps": "Q5_0", "ffn_down_exps": "Q8_0", "ffn_gate_inp": "F32"}
    values = write_gguf(file, folder, lambda name: kinds.get(name.split(".")[-2], "Q4_1"))
    save_file({name: torch.from_numpy(array.copy()) for name, array in values.items()}, folder / "model.safetensors")
    (text,) = texts((40,))
    got, exact = (Stepper(path, 1, dtype="float32").step({0: text})[0] for path in (file, folder))
    assert (got - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_an_nvfp4_matrix_is_multiplied_by_the_scale_of_its_tensor(tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "model.gguf"
    write_random(folder, "Llama", **WIDE)
    scales: dict[str, tuple[str, int]] = {f"blk.0.ffn_up.{kind}": ("F32", 1) for kind in ("scale", "input_scale")}
    values = write_gguf(file, folder, lambda name: "NVFP4" if "ffn_up" in name else "F16", extra=scales)
    with file.open("r+b") as opened:
        opened.seek(open_gguf(file).tensors["blk.0.ffn_up.scale"].first)
        opened.write(struct.pack("<f", 0.75))
    values["model.layers.0.mlp.up_proj.weight"] *= np.float32(0.75)
    save_file({name: torch.from_numpy(array.copy()) for name, array in values.items()}, folder / "model.safetensors")
    (text,) = texts((40,))
    got, exact = (Stepper(path, 1, dtype="float32").step({0: text})[0] for path in (file, folder))
    assert (got - exact).abs().mean() < 0.02 * exact.abs().mean()
    with file.open("r+b") as opened:
        opened.seek(open_gguf(file).tensors["blk.0.ffn_up.scale"].first)
        opened.write(struct.pack("<f", float("nan")))
    with pytest.raises(CheckpointError, match=r"scale 'blk\.0\.ffn_up\.scale' that is not finite"):
        Stepper(file, 1)


@pytest.mark.parametrize("kind", ["Q8_1", "Q1_0", "F64", "I8"])
def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write_random(tmp_path / "hf", "Llama", **WIDE)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", lambda name: kind if "ffn_up" in name else "Q8_0")
    with pytest.raises(
        CheckpointError, match=rf"stores its tensor 'blk\.0\.ffn_up\.weight' as {kind}, .*supported: F32"
    ):
        Stepper(tmp_path / "model.gguf", 1)


def test_tensors_that_the_model_does_not_have_and_vectors_in_blocks_are_refused(tmp_path: Path) -> None:
    write_random(tmp_path / "hf", "Llama", **WIDE)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", extra={"blk.0.attn_sinks.weight": ("F32", 8)})
    with pytest.raises(CheckpointError, match=r"holds .*attn_sinks\.weight, which this architecture does not have"):
        Stepper(tmp_path / "model.gguf", 1)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", vectors="Q8_0")
    with pytest.raises(CheckpointError, match=r"norm\.weight in .* is a vector of type Q8_0; vectors are read as F32"):
        Stepper(tmp_path / "model.gguf", 1)


@pytest.mark.parametrize("head", [{}, {"llama__nextn_predict_layers": 1}], ids=["no head", "head"])
def test_layers_beyond_those_that_the_file_counts_are_refused(tmp_path: Path, head: dict[str, Any]) -> None:
    write_random(tmp_path / "hf", "Llama", **(WIDE | {"num_hidden_layers": 3}))
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", llama__block_count=2, **head)
    with pytest.raises(CheckpointError, match=r"holds blk\.2\.attn_k\.weight, .* this architecture does not have"):
        Stepper(tmp_path / "model.gguf", 1)


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "model.gguf"
    name = "model.layers.0.mlp.up_proj.weight"
    write_random(folder, "Llama", **WIDE)
    stored = load_file(folder / "model.safetensors")
    moved = {key.replace("layers.0.mlp.up", "layers.1.mlp.up"): tensor for key, tensor in stored.items()}
    save_file(moved, folder / "model.safetensors")
    write_gguf(file, folder)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'blk\.0\.ffn_up\.weight'"):
        Stepper(file, 1)
    save_file(stored | {name: stored[name].T.contiguous()}, folder / "model.safetensors")
    write_gguf(file, folder)
    with pytest.raises(CheckpointError, match=r"has the shape \[256, 512\]; the model's config requires \[512, 256\]"):
        Stepper(file, 1)
