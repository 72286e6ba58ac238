"""Mistral 4: DeepSeek's latent attention and experts, with softmax routing and a query scale by position.

x += attention(norm(x))                         DeepSeek V3's, with q *= 1 + beta * log(1 + floor(position / context))
n = norm(x)
p = top_k(softmax(Wr n))                        may be divided by their sum
x += scaling * sum of p[e] * mlp_e(n) + shared_mlp(n)                    first layers, if any: mlp(n)
"""

from dataclasses import replace

from penstock.layers.latent import LatentAttentionSpec
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.models.families.deepseek import latent_model, latent_scale
from penstock.models.families.dense import check_rotation, read_dense
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_USUAL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The default for configs without RoPE settings."""


def mistral4_spec(config: HFConfig) -> ModelSpec:
    """Read a `Mistral4ForCausalLM`."""
    key_dim, rotated = config.size("qk_nope_head_dim", 64), config.size("qk_rope_head_dim", 64)
    head_dim = key_dim + rotated
    for key in ("head_dim", "qk_head_dim"):
        config.expect(key, head_dim, None)
    dense = read_dense(config, max_position=1048576, head_dim=head_dim, num_kv_heads=32, reads_rope=False)
    rope, temperature = _positions(config, head_dim, rotated, dense.model.max_position)
    attention = LatentAttentionSpec(
        hidden_size=dense.model.hidden_size,
        num_heads=dense.attention.num_heads,
        rank=config.size("kv_lora_rank", 256),
        key_dim=key_dim,
        value_dim=config.size("v_head_dim", 128),
        rope=rope,
        scale=latent_scale(key_dim, rope),
        query_rank=config.find_size("q_lora_rank", absent=1024),
        paired=config.get("rope_interleave", True),
        bias=config.get("attention_bias", False),
        temperature=temperature,
    )
    config.expect("n_group", 1, None)
    config.expect("topk_group", 1, None)
    routing = read_routing(
        config,
        config.size("n_routed_experts", 128),
        4,
        renormalize=config.get("norm_topk_prob", True),
        epsilon=1e-20,
        scaling=config.positive("routed_scaling_factor", 1.0),
    )
    first = config.size("first_k_dense_replace", 0, least=0)
    sparse = [index >= first for index in range(dense.num_layers)]
    model = latent_model(config, dense, attention, sparse, routing, correction=False)
    return replace(model, max_position=rope.context(dense.model.max_position))


def _positions(
    config: HFConfig, head_dim: int, rotated: int, max_position: int
) -> tuple[RopeConfig, TemperatureConfig | None]:
    common = {"rope_theta": config.positive("rope_theta", 1e4), "partial_rotary_factor": rotated / head_dim}
    given = common | (config.rope_settings(common) or _USUAL)
    section = config.section(given)
    every = section.size("original_max_position_embeddings", max_position)
    temperature = None
    if section.has("llama_4_scaling_beta"):
        temperature = TemperatureConfig(section.positive("llama_4_scaling_beta", 0.1, or_zero=True), every)
    others = {"llama_4_scaling_beta", "max_position_embeddings"}  # the second repeats the config's own key
    rope = config.rope_of({key: given[key] for key in given.keys() - others}, head_dim, max_position)
    check_rotation(rope, head_dim, config)
    if rope.dim != rotated:
        raise config.unsupported("partial_rotary_factor", given["partial_rotary_factor"], (rotated / head_dim,))
    return rope, temperature
