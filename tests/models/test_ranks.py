"""A model divided among ranks gives the logits of one that is not, bit for bit: of every kind of part and weight."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import native
from penstock.errors import ConfigError
from penstock.kernels.ranks import Collective
from penstock.models.registry import read_facts
from tests.quantization.stored import write_int4, write_layers
from tests.quantization.test_float8 import FORMS, random_float8, random_scales
from tests.quantization.test_stored import INT4
from tests.support.checkpoints import write_random, write_tiny_llama
from tests.support.families import CASES, SHAPE
from tests.support.gguf_files import write_gguf
from tests.support.needs import needs_native
from tests.support.ranks import in_ranks, logits
from tests.support.stepping import settings_for

pytestmark = needs_native

TEXT = random.Random(3).choices(range(160), k=40)
PIECES = [TEXT[:25], TEXT[25:26], TEXT[26:]]
FAMILIES = [
    "llama, all biases",
    "llama4, two of some experts, some layers without, biases",
    "gemma2",
    "gemma4, per-layer embeddings, shared keys",
    "gemma4 mixture, one expert",
    "olmo2, two to one, biases",  # queries and keys are normalised over all heads, which are of several ranks
    "phi3",  # one matrix of queries, keys and values, one of gates and inputs
    "phimoe, biases, sliding, few experts",
    "qwen3.5",
    "qwen3-next",
    "granite hybrid, experts",  # one group of the norm, of several ranks
    "nemotron-h, latent experts, not renormalised",
    "lfm2 moe, not renormalised, no correction",
    "deepseek v2, groups, yarn, biases",
    "gpt-oss",
    "afmoe",  # a projection of gates for all columns of the attention
    "apertus",
    "bloom, heads that are no power of two, not tied",  # slopes of the own heads
    "cohere",
    "falcon, grouped",  # one matrix of queries, keys and values, by head of keys
    "falcon-h1, normalised before the gate, biases",
    "gpt-neox",  # one matrix of queries, keys and values, by head
    "gpt2",
    "hunyuan moe",
    "jamba",
    "kimi linear",
    "lfm3",
    "mistral4",
    "olmoe, clipped",
    "opt",  # a table of positions without its first rows
]


def check_equal(folder: Path, size: int = 2, **options: Any) -> None:
    library = native.library()
    assert library is not None

    def of_rank(collective: Collective) -> torch.Tensor:
        return logits(folder, collective, PIECES, **options)

    alone = logits(folder, None, PIECES, **options)
    assert torch.equal(in_ranks(library, size, of_rank)[0], alone)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_same_bits(name: str, tmp_path: Path) -> None:
    family, config = CASES[name]
    write_random(tmp_path, family, **(SHAPE | config))
    check_equal(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}],
    ids=str,
)
def test_two_ranks_give_the_same_bits_of_weights_of_a_kind(tiny_llama: Path, options: dict[str, Any]) -> None:
    check_equal(tiny_llama, **options)


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}], ids=str)
def test_experts_that_are_divided_give_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    family, config = CASES["qwen3 moe, a layer without experts"]
    write_random(tmp_path, family, **(SHAPE | config))
    check_equal(tmp_path, **options)


@pytest.mark.parametrize("form", ["gptq", "awq", "packed, with zeros"])
def test_stored_integers_are_divided_as_they_are(tmp_path: Path, form: str) -> None:
    write, config, groups = INT4[form]
    write_int4(tmp_path, write, config, groups)
    check_equal(tmp_path)


def test_stored_blocks_of_fp8_are_divided_though_ranks_have_parts_of_a_block(tmp_path: Path) -> None:
    per, scale_name, config = FORMS["fp8, blocks"]
    generator = torch.Generator().manual_seed(0)

    def store(name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        return {
            "weight": random_float8(*shape, generator),
            scale_name: random_scales(per, *shape, generator),
        }

    write_layers(tmp_path, config, store)
    check_equal(tmp_path)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_1"])
def test_gguf_files_are_divided(tmp_path: Path, stored: str) -> None:
    write_gguf(tmp_path / "model.gguf", write_tiny_llama(tmp_path / "hf"), stored)
    check_equal(tmp_path / "model.gguf")


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_ranks_may_have_more_rows_than_others(tmp_path: Path, options: dict[str, Any]) -> None:
    """Three ranks of 128 columns and of 385 tokens."""
    write_tiny_llama(tmp_path, num_attention_heads=6, num_key_value_heads=3, vocab_size=385, tie_word_embeddings=True)
    check_equal(tmp_path, size=3, **options)


def test_a_rank_plans_with_its_part_alone(tiny_llama: Path) -> None:
    checkpoint, whole = settings_for(tiny_llama)
    _, half = settings_for(tiny_llama, tensor_parallel_size=2)
    assert half.memory.weights < 0.6 * whole.memory.weights
    assert half.memory.num_tokens == whole.memory.num_tokens  # 1 MiB of half the heads for 2 MiB of all
    assert read_facts(checkpoint, ranks=2).num_parameters < 0.6 * read_facts(checkpoint).num_parameters


@pytest.mark.parametrize(("size", "fitting"), [(3, "1, 2"), (4, "1, 2")])
def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_would(
    tiny_llama: Path, size: int, fitting: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} does not divide .*; {fitting} would$"):
        settings_for(tiny_llama, tensor_parallel_size=size)
