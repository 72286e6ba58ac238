"""Nemotron 3 and 4, Minitron (dense): layer norms that multiply by 1 + weight, RoPE on half of each head, squared relu.

x += attention(norm(x))      Llama's; RoPE on the first half of each head; layer norms with biases
x += Wd relu(Wu norm(x))²
"""

from dataclasses import replace

from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def nemotron_spec(config: HFConfig) -> ModelSpec:
    """Read a `NemotronForCausalLM`."""
    dense = read_dense(
        config,
        max_position=4096,
        norm_eps=1e-5,
        norm_eps_key="norm_eps",
        norm_offset=1.0,
        norm_bias=True,
        partial_rotary=0.5,
        activation=None,
    )
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
