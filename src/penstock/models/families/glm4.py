"""GLM-4 (dense): norms before each part, 0414 also after it; interleaved RoPE on the first half of each head.

x += norm(attention(norm(x)))     RoPE turns elements 2 i and 2 i + 1 of a head's first half together
x += norm(mlp(norm(x)))           GLM-4-9B: x += attention(norm(x)); x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec


def glm_spec(config: HFConfig) -> ModelSpec:
    """Read a `GlmForCausalLM`."""
    dense = _dense(config)
    return replace(dense.model, layers=tuple(map(dense.layer, range(dense.num_layers))))


def glm4_spec(config: HFConfig) -> ModelSpec:
    """Read a `Glm4ForCausalLM`."""
    dense = _dense(config)

    def layer(index: int) -> LayerSpec:
        spec = dense.layer(index)
        assert spec.mixer is not None
        assert spec.feed_forward is not None
        return replace(
            spec,
            mixer=replace(spec.mixer, norm_after=dense.norm("post_self_attn_layernorm")),
            feed_forward=replace(spec.feed_forward, norm_after=dense.norm("post_mlp_layernorm")),
        )

    return replace(dense.model, layers=tuple(layer(index) for index in range(dense.num_layers)))


def _dense(config: HFConfig) -> Dense:
    dense = read_dense(
        config, max_position=131072, head_dim=128, num_kv_heads=2, norm_eps=1.5625e-7, partial_rotary=0.5
    )
    return replace(
        dense,
        attention=replace(dense.attention, qkv_bias=config.get("attention_bias", True), interleaved_rope=True),
        mlp=replace(dense.mlp, gate_up=("mlp.gate_up_proj",)),
    )
