"""Jais 2 (8B, 70B): Llama with layer norms, biases throughout, and MLPs without gates.

x += attention(norm(x))      Llama's, with biases
x += Wd relu(Wu norm(x) + bu)² + bd
"""

from dataclasses import replace

from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def jais2_spec(config: HFConfig) -> ModelSpec:
    """Read a `Jais2ForCausalLM`."""
    dense = read_dense(
        config, max_position=8192, norm_eps=1e-5, norm_eps_key="layer_norm_eps", norm_bias=True, activation=None
    )
    bias = config.get("attention_bias", True)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias)
    mlp = PlainMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        config.get("mlp_bias", True),
        activation=read_activation(config, "hidden_act", "relu2"),
    )
    return replace(dense.model, layers=tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers)))
