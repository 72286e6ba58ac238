"""StarCoder 2: layer norms with biases, biases throughout, MLPs without gates; optionally a sliding window.

x += attention(norm(x))      Llama's, with biases; over the last `sliding_window` keys where the config has one
x += Wd gelu(Wu norm(x) + bu) + bd
"""

from dataclasses import replace

from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def starcoder2_spec(config: HFConfig) -> ModelSpec:
    """Read a `Starcoder2ForCausalLM`."""
    dense = read_dense(
        config,
        max_position=4096,
        num_kv_heads=2,
        norm_eps=1e-5,
        norm_eps_key="norm_epsilon",
        norm_bias=True,
        tied=True,
        activation=None,
    )
    bias = config.get("use_bias", True)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias, window=config.find_size("sliding_window"))
    mlp = PlainMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        bias,
        "mlp.c_fc",
        "mlp.c_proj",
        read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
    )
    layers = tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
