"""Arcee's AFM (4.5B): Llama with an MLP without a gate.

x += attention(norm(x))      Llama's
x += Wd relu(Wu norm(x))²
"""

from dataclasses import replace

from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def arcee_spec(config: HFConfig) -> ModelSpec:
    """Read an `ArceeForCausalLM`."""
    dense = read_dense(config, max_position=4096, norm_eps=1e-5, activation=None)
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias)
    mlp = PlainMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        config.get("mlp_bias", False),
        activation=read_activation(config, "hidden_act", "relu2"),
    )
    layers = tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
