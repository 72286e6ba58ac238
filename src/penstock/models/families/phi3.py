"""Phi-3, Phi-3.5 and Phi-4 (mini): Llama with fused matrices; `longrope` for long contexts.

x += attention(norm(x))      Llama's; Wq, Wk and Wv are one matrix, and so are Wg and Wu
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.layers.rope import RopeConfig
from penstock.models.families.dense import check_rotation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def phi3_spec(config: HFConfig) -> ModelSpec:
    """Read a `Phi3ForCausalLM`."""
    dense = read_dense(config, max_position=4096, norm_eps=1e-5, reads_rope=False)
    attention = replace(
        dense.attention,
        rope=_rope(config, dense.attention.head_dim, dense.model.max_position),
        window=config.find_size("sliding_window"),
        names=replace(dense.attention.names, qkv=("self_attn.qkv_proj",)),
    )
    mlp = replace(dense.mlp, gate_up=("mlp.gate_up_proj",))
    layers = tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)


def _rope(config: HFConfig, head_dim: int, max_position: int) -> RopeConfig:
    """The RoPE config; older files name `longrope` "su" or "yarn"."""
    common = {
        "rope_theta": config.positive("rope_theta", 10000.0),
        "partial_rotary_factor": config.positive("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": config.size("original_max_position_embeddings", 4096),
    }
    given = config.rope_settings(common)
    kind = given.get("rope_type", given.get("type", "default"))
    known = {"rope_type": "longrope"} if kind in ("su", "yarn") else {}
    rope = config.rope_of({**common, **given, **known}, head_dim, max_position)
    check_rotation(rope, head_dim, config)
    return rope
