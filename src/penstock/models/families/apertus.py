"""Apertus (8B, 70B): norms of query and key heads, and MLPs without gates by xIELU, whose shape each layer learns.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised head by head
x += Wo attend(rope(q), rope(k), v)
x += Wd xielu(Wu norm(x))                       above 0: a x² + x / 2; below: (b + 1/2) (exp(x) - 1 - x) + x / 2
"""

from dataclasses import replace

from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.models.families.dense import ACTIVATIONS, Dense, check_rotation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer

_THETA = 12e6
_USUAL = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The default for configs without RoPE settings."""


def apertus_spec(config: HFConfig) -> ModelSpec:
    """Read an `ApertusForCausalLM`."""
    dense = read_dense(config, max_position=65536, norm_eps=1e-5, activation=None, reads_rope=False)
    bias, max_position = config.get("attention_bias", False), dense.model.max_position
    rope = _rope(config, dense.attention.head_dim, max_position)
    attention = replace(dense.attention, rope=rope, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps)
    mlp = _mlp(config, dense)
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(
                f"model.layers.{index}",
                SubLayer(attention, dense.norm("attention_layernorm")),
                SubLayer(mlp, dense.norm("feedforward_layernorm")),
            )
            for index in range(dense.num_layers)
        ),
        max_position=rope.context(max_position),
        names=replace(dense.model.names, ignored=(*dense.model.names.ignored, r".*\.act_fn\.(beta|eps)")),
    )


def _mlp(config: HFConfig, dense: Dense) -> PlainMLPSpec:
    mlp = PlainMLPSpec(dense.model.hidden_size, dense.mlp.intermediate_size)
    config.expect("hidden_act", "xielu", *ACTIVATIONS)
    name = config.get("hidden_act", "xielu")
    return replace(mlp, xielu="mlp.act_fn") if name == "xielu" else replace(mlp, activation=ACTIVATIONS[name])


def _rope(config: HFConfig, head_dim: int, max_position: int) -> RopeConfig:
    if config.has("rope_parameters") or config.has("rope_scaling"):
        rope = config.rope(head_dim, max_position, theta=_THETA)
    else:
        config.expect("rope_theta", _THETA)
        rope = config.rope_of(_USUAL, head_dim, max_position)
    check_rotation(rope, head_dim, config)
    return rope
