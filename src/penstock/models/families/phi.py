"""Phi-1, 1.5 and 2: attention and MLP side by side, layer norms, RoPE on a part of each head.

n = norm(x)                                     one norm for both parts: a layer norm with a bias
x += attention(n) + Wd gelu(Wu n + bu) + bd     biases throughout, that of the logits included
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames
from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer

_NAMES = AttentionNames(output="self_attn.dense")


def phi_spec(config: HFConfig) -> ModelSpec:
    """Read a `PhiForCausalLM`."""
    config.expect("qk_layernorm", False)
    dense = read_dense(
        config,
        max_position=2048,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_eps",
        norm_bias=True,
        partial_rotary=0.5,
        activation=None,
    )
    attention = replace(dense.attention, qkv_bias=True, output_bias=True, names=_NAMES)
    mlp = PlainMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        bias=True,
        up="mlp.fc1",
        down="mlp.fc2",
        activation=read_activation(config, "hidden_act", "gelu_new"),
    )
    mixer = SubLayer(attention, dense.norm("input_layernorm"))
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(f"model.layers.{index}", mixer, SubLayer(mlp, None), parallel=True)
            for index in range(dense.num_layers)
        ),
        final_norm=dense.norm("model.final_layernorm"),
        output_bias=True,
    )
