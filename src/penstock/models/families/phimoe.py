"""Phi-3.5-MoE: SparseMixer routing, layer norms with biases, biases throughout.

    x += attention(norm(x))                         layer norms with biases
    n = norm(x)
    p = sparse_mixer(Wr n)                          two experts, each by a softmax over the logits close to it
    x += sum of p[e] * mlp_e(n)

With `longrope`, cosines and sines are multiplied by `short_mscale` or `long_mscale`, matching the short or long
factors, as in the published model. (`transformers` 5.23 uses the short factors for long texts, too.)
"""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.layers.mixture import MixtureSpec
from penstock.layers.rope import RopeConfig
from penstock.models.families.dense import check_rotation, read_dense
from penstock.models.families.mixtral import NAMES
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_MSCALES = ("short_mscale", "long_mscale")


def phimoe_spec(config: HFConfig) -> ModelSpec:
    """Read a `PhimoeForCausalLM` (older files: `PhiMoEForCausalLM`)."""
    config.ignore("input_jitter_noise")  # used in training only
    dense = read_dense(config, max_position=4096 * 32, num_kv_heads=8, norm_eps=1e-5, norm_bias=True, reads_rope=False)
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention,
        rope=_rope(config, dense.attention.head_dim, dense.model.max_position),
        window=config.find_size("sliding_window"),
        qkv_bias=bias,
        output_bias=bias,
    )
    config.expect("num_experts_per_tok", 2)
    jitter = config.positive("router_jitter_noise", 0.01, or_zero=True)
    routing = read_routing(config, config.size("num_local_experts", 16), top_k=2, score="sparsemixer", jitter=jitter)
    mixture = MixtureSpec(dense.model.hidden_size, dense.mlp.intermediate_size, routing, names=NAMES)
    return replace(
        dense.model,
        layers=tuple(dense.layer(index, attention, mixture) for index in range(dense.num_layers)),
        output_bias=config.get("lm_head_bias", False),
    )


def _rope(config: HFConfig, head_dim: int, max_position: int) -> RopeConfig:
    common = {
        "rope_theta": config.positive("rope_theta", 1e6),
        "original_max_position_embeddings": config.size("original_max_position_embeddings", 4096),
    }
    given = config.rope_settings(common)
    plain = {key: value for key, value in given.items() if key not in _MSCALES}
    rope = config.rope_of({**common, **plain}, head_dim, max_position)
    check_rotation(rope, head_dim, config)
    if rope.type == "default":
        return rope
    if rope.type != "longrope":
        raise config.unsupported("rope type", rope.type, ("default", "longrope"))
    section = config.section(given)
    if not all(map(section.has, _MSCALES)):
        raise CheckpointError(f"{config.file}: rope type 'longrope' lacks {' or '.join(_MSCALES)}")
    return replace(rope, mscales=(section.positive(_MSCALES[0], 1.0), section.positive(_MSCALES[1], 1.0)))
