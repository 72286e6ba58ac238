"""LFM3: gated short convolutions, sliding windows and full attention in turn; heads with gates, norms on both sides.

n = norm(x)
b, c, v = Wi n
x += norm(Wo (c * conv(b * v)))                 each channel over the last 7 tokens
q, k, v, g = norm(Wq n), norm(Wk n), Wv n, Wg n                          or attention; g has one number a head
x += norm(Wo (attend(rope(q), rope(k), v) * sigmoid(g)))                 full layers: half of the frequencies turn
x += norm(mlp(norm(x)))
"""

from dataclasses import replace
from typing import Any

from penstock.layers.spec import MixerSpec, NormSpec
from penstock.models.families.dense import Dense, check_rotation, read_dense
from penstock.models.families.lfm2 import lfm2_mlp, read_conv
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer

_CONV, _FULL, _SLIDING = "conv", "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Defaults for configs without `rope_parameters`."""


def lfm3_spec(config: HFConfig) -> ModelSpec:
    """Read an `Lfm3ForCausalLM`."""
    dense = read_dense(
        config,
        max_position=128_000,
        head_dim=128,
        num_kv_heads=4,
        norm_eps=1e-5,
        norm_eps_key="norm_eps",
        tied=True,
        reads_rope=False,
    )
    mixers = _mixers(config, dense)
    mlp = lfm2_mlp(dense.model.hidden_size, dense.mlp.intermediate_size)
    default = [_FULL if i % 4 == 2 else _SLIDING if i % 4 == 0 and i > 0 else _CONV for i in range(dense.num_layers)]
    kinds = config.layer_kinds(dense.num_layers, tuple(mixers), default)
    after = config.get("use_sandwich_norm", True)

    def norm_after(name: str) -> NormSpec | None:
        return dense.norm(name) if after else None

    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(
                f"model.layers.{index}",
                SubLayer(mixers[kind], dense.norm("operator_norm"), norm_after("post_operator_norm")),
                SubLayer(mlp, dense.norm("ffn_norm"), norm_after("post_ffn_norm")),
            )
            for index, kind in enumerate(kinds)
        ),
        final_norm=dense.norm("model.embedding_norm"),
    )


def _mixers(config: HFConfig, dense: Dense) -> dict[str, MixerSpec]:
    """The mixer of each kind of layer."""
    head_dim, max_position = dense.attention.head_dim, dense.model.max_position
    config.expect("rope_scaling", None)
    given = config.section(config.find("rope_parameters", dict) or _ROPES)
    given.refuse_others("rope_parameters of layers", _ROPES)
    ropes = {kind: config.rope_of(given.need(kind, dict), head_dim, max_position) for kind in _ROPES}
    for rope in ropes.values():
        check_rotation(rope, head_dim, config)
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=dense.norm_eps,
        head_gates=config.get("use_attention_gate", True),
    )
    window = config.find_size("sliding_window", absent=256)
    return {
        _CONV: read_conv(config, dense, 7),
        _FULL: replace(attention, rope=ropes[_FULL]),
        _SLIDING: replace(attention, rope=ropes[_SLIDING], window=window),
    }
