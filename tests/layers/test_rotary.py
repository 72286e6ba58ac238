"""Frequencies and attention factors as `transformers` computes them, but for its rounding; tables of defined bits."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.tables import make_ops
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.rotary import PAGE, Rotary, Temperatures, rope_frequencies
from penstock.quantization.base import Unquantized, WeightFactory

CPU = torch.device("cpu")
FACTORY = WeightFactory(Unquantized(), make_ops(CPU), torch.float32, CPU)

CASES = {
    "default": (RopeConfig(dim=64, theta=1e6), {"rope_type": "default"}),
    "linear": (RopeConfig(dim=64, theta=1e6, type="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeConfig(
            dim=64,
            theta=1e6,
            type="llama3",
            factor=8.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        RopeConfig(dim=64, theta=1e6, type="yarn", factor=4.0, original_max_position=32768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn of no width": (
        RopeConfig(dim=64, theta=1e6, type="yarn", factor=4.0, original_max_position=32768, beta_fast=1.0),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 1.0},
    ),
    "yarn with scales": (
        RopeConfig(
            dim=64,
            theta=1e6,
            type="yarn",
            factor=40.0,
            original_max_position=4096,
            mscale=1.0,
            mscale_all_dim=0.7,
            truncate=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, settings = CASES[name]
    reference: Any = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=settings | {"rope_theta": 1e6},
    )
    if name == "default":
        wanted, factor = 1.0 / (1e6 ** (torch.arange(0, 64, 2).float() / 64)), 1.0
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](reference, torch.device("cpu"))
    frequencies, attention_factor = rope_frequencies(config)
    torch.testing.assert_close(torch.from_numpy(frequencies), wanted, rtol=3e-6, atol=0)
    assert attention_factor == pytest.approx(factor, abs=1e-12)


def test_angles_are_position_times_frequency_and_carry_the_attention_factor() -> None:
    config = RopeConfig(dim=4, theta=100.0, type="yarn", original_max_position=8, attention_factor=2.0)
    frequencies = torch.from_numpy(rope_frequencies(config)[0])
    cos, sin = extended(config, 1500).angles(torch.tensor([0, 3, 1499])).unbind(1)
    for row, position in enumerate((0, 3, 1499)):
        torch.testing.assert_close(cos[row] / 2, torch.cos(position * frequencies))
        torch.testing.assert_close(sin[row] / 2, torch.sin(position * frequencies))


def test_a_table_has_the_same_bits_on_every_machine() -> None:
    """Whatever numpy's and torch's versions, the C library and the processor are."""
    tables = [extended(config, 2 * PAGE).angles(torch.arange(2 * PAGE)) for config, _ in CASES.values()]
    digest = hashlib.sha256(b"".join(table.numpy().tobytes() for table in tables))
    assert digest.hexdigest()[:16] == "4ad91b32bd5253ab"


def test_the_factors_on_queries_are_rounded_once() -> None:
    factors = Temperatures(TemperatureConfig(beta=0.1, every=8192), 131072, FACTORY).at(torch.arange(131072))
    exact = 1 + 0.1 * np.log(1 + np.arange(131072) // 8192)
    assert factors[:, 0].tolist() == exact.astype(np.float32).tolist()


def test_the_angles_of_a_position_do_not_depend_on_how_many_there_are() -> None:
    config = RopeConfig(dim=10, theta=1e4)
    few, many = (extended(config, count).angles(torch.arange(1030)) for count in (1030, 3000))
    assert torch.equal(few, many)


def extended(config: RopeConfig, num_positions: int) -> Rotary:
    rotary = Rotary(config, num_positions, FACTORY)
    for page in range(-(-num_positions // PAGE)):
        rotary.compute_page(page)
    return rotary
