"""DeepSeek V2 to V3.2, GLM 4.7 Flash and 5, Youtu: multi-head latent attention, experts after the first layers.

q = Wq n, or Wqb norm(Wqa n)                    n = norm(x); each head: a plain part and one with RoPE
c, r = Wkva n; c = norm(c)                      what the cache keeps: a latent, and a key part with RoPE for all
k, v = Wkvb c                                   heads; computed by moving Wkvb to q and to the result
x += Wo attend(q, [k, r], v)
n = norm(x)
s = softmax(Wr n), V3: sigmoid                  V3: the experts are chosen by s + correction, in the best groups
x += scaling * sum of s[e] * mlp_e(n) + shared_mlp(n)                    V3: s / sum(s); first layers: mlp(n)

V3.2 and GLM 5 attend to the `index_topk` keys that an indexer chooses. Up to that many tokens these are all keys, so
the indexer is skipped, and longer texts are refused.
"""

import math
from dataclasses import replace

from penstock.config.feed_forward import Routing
from penstock.layers.latent import LatentAttentionSpec
from penstock.layers.mixture import MixtureSpec
from penstock.layers.rope import RopeConfig
from penstock.models.families.dense import Dense, nextn_head, read_dense
from penstock.models.families.mixtures import read_routing, shared_experts, sparse_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def deepseek_v2_spec(config: HFConfig) -> ModelSpec:
    """Read a `DeepseekV2ForCausalLM`: softmax routing among all experts, or in groups chosen by their best expert."""
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False)
    config.expect("moe_layer_freq", 1)
    config.expect("topk_method", "greedy", "group_limited_greedy")
    grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
    groups, kept = config.size("n_group", 1), config.size("topk_group", 1)
    routing = read_routing(
        config,
        config.size("n_routed_experts", 64),
        scaling=config.positive("routed_scaling_factor", 1.0),
        groups=groups if grouped else 1,
        top_groups=kept if grouped else 1,
    )
    dense = _dense(config, max_position=2048)
    first = config.size("first_k_dense_replace", 0, least=0)
    sparse = [index >= first for index in range(dense.num_layers)]
    attention = _attention(config, dense, paired=True)
    return latent_model(config, dense, attention, sparse, routing, correction=False)


def deepseek_v3_spec(config: HFConfig) -> ModelSpec:
    """Read a `DeepseekV3ForCausalLM`: sigmoid routing with a correction bias, within groups chosen by their two best
    experts.
    """
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("moe_layer_freq", 1)
    dense = _dense(config, max_position=4096)
    first = config.size("first_k_dense_replace", 3, least=0)
    sparse = [index >= first for index in range(dense.num_layers)]
    return _with_sigmoids(config, dense, sparse, num_experts=256, groups=(8, 4), scaling=2.5)


def deepseek_v32_spec(config: HFConfig) -> ModelSpec:
    """Read a `DeepseekV32ForCausalLM`: DeepSeek V3, for texts of up to `index_topk` tokens."""
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("moe_layer_freq", 1)
    dense = _dense(config, max_position=163840)
    return _indexed(config, dense, groups=(8, 4), key_dim=128)


def glm_moe_dsa_spec(config: HFConfig) -> ModelSpec:
    """Read a `GlmMoeDsaForCausalLM` (GLM 5): DeepSeek V3.2, with layers that share the choice of an earlier layer."""
    config.ignore("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    dense = _dense(config, max_position=202752, norm_eps=1e-5)
    return _indexed(config, dense, groups=(1, 1), key_dim=192)


def _indexed(config: HFConfig, dense: Dense, groups: tuple[int, int], key_dim: int) -> ModelSpec:
    """The model for texts in which the indexer chooses all keys."""
    config.expect("rope_interleave", True)
    config.ignore("index_n_heads", "index_head_dim", "indexer_rope_interleave")  # of the indexer
    config.layer_kinds(dense.num_layers, ("indexed_attention",), [])
    first = config.size("first_k_dense_replace", 3, least=0)
    sparse = sparse_layers(config, dense.num_layers, lambda index: index >= first)
    model = _with_sigmoids(config, dense, sparse, num_experts=256, groups=groups, scaling=2.5, key_dim=key_dim)
    most = config.size("index_topk", 2048)
    ignored = (*model.names.ignored, r".*\.self_attn\.indexer\..*", r"blk\.\d+\.indexer\..*")
    model = replace(model, names=replace(model.names, ignored=ignored))
    if most >= model.max_position:
        return model
    return replace(model, max_position=most, limit="its index_topk, as its indexer for longer texts is not implemented")


def glm4_moe_lite_spec(config: HFConfig) -> ModelSpec:
    """Read a `Glm4MoeLiteForCausalLM`: DeepSeek V3, with the layers that have experts listed in `mlp_layer_types`."""
    dense = _dense(config, max_position=202752, norm_eps=1e-5)
    sparse = sparse_layers(config, dense.num_layers, lambda index: index >= 1)
    return _with_sigmoids(config, dense, sparse, 64, groups=(1, 1), scaling=1.8)


def youtu_spec(config: HFConfig) -> ModelSpec:
    """Read a `YoutuForCausalLM`: DeepSeek V3's attention, with an MLP in each layer."""
    dense = _dense(config, max_position=131072)
    dense = replace(dense, model=replace(dense.model, tie_embeddings=config.get("tie_word_embeddings", True)))
    attention = _attention(config, dense, paired=config.get("rope_interleave", True))
    return replace(dense.model, layers=tuple(dense.layer(index, attention) for index in range(dense.num_layers)))


def _dense(config: HFConfig, max_position: int, norm_eps: float = 1e-6) -> Dense:
    rotated = config.size("qk_rope_head_dim", 64)
    config.expect("head_dim", rotated, None)
    return read_dense(config, max_position=max_position, head_dim=rotated, norm_eps=norm_eps)


def _with_sigmoids(
    config: HFConfig,
    dense: Dense,
    sparse: list[bool],
    num_experts: int,
    groups: tuple[int, int],
    scaling: float,
    key_dim: int = 128,
) -> ModelSpec:
    routing = read_routing(
        config,
        config.size("n_routed_experts", num_experts),
        score="sigmoid",
        renormalize=config.get("norm_topk_prob", True),
        epsilon=1e-20,
        scaling=config.positive("routed_scaling_factor", scaling),
        groups=config.size("n_group", groups[0]),
        top_groups=config.size("topk_group", groups[1]),
        group_tops=2,
    )
    attention = _attention(config, dense, paired=config.get("rope_interleave", True), key_dim=key_dim)
    return latent_model(config, dense, attention, sparse, routing, correction=True)


def latent_model(
    config: HFConfig,
    dense: Dense,
    attention: LatentAttentionSpec,
    sparse: list[bool],
    routing: Routing,
    *,
    correction: bool,
) -> ModelSpec:
    """A model of latent attention, with experts in the layers that are `sparse`."""
    hidden = dense.model.hidden_size
    inner = config.size("moe_intermediate_size", 1408)
    shared = shared_experts(hidden, inner * config.size("n_shared_experts", 1))
    mixture = MixtureSpec(hidden, inner, routing, correction=correction, shared=shared)
    layers = tuple(dense.layer(index, attention, mixture if has else None) for index, has in enumerate(sparse))
    num_mtp_layers = config.size("num_nextn_predict_layers", 0, least=0)
    mtp_tensors = (rf"model\.layers\.{dense.num_layers + index}\..*" for index in range(num_mtp_layers))
    names = replace(dense.model.names, ignored=(*dense.model.names.ignored, *mtp_tensors))
    head = nextn_head(dense.layer(dense.num_layers, attention, mixture), hidden, dense.norm_eps)
    return replace(dense.model, layers=layers, names=names, mtp=head if num_mtp_layers else None)


def _attention(config: HFConfig, dense: Dense, *, paired: bool, key_dim: int = 128) -> LatentAttentionSpec:
    rope, key_dim = dense.attention.rope, config.size("qk_nope_head_dim", key_dim)
    assert rope is not None, "read_dense gives one"
    config.expect("mlp_bias", False)
    config.expect("qk_head_dim", key_dim + rope.dim, None)
    return LatentAttentionSpec(
        hidden_size=dense.model.hidden_size,
        num_heads=dense.attention.num_heads,
        rank=config.size("kv_lora_rank", 512),
        key_dim=key_dim,
        value_dim=config.size("v_head_dim", 128),
        rope=rope,
        scale=latent_scale(key_dim, rope),
        query_rank=config.find_size("q_lora_rank"),
        paired=paired,
        bias=config.get("attention_bias", False),
    )


def latent_scale(key_dim: int, rope: RopeConfig) -> float:
    """Factor on the scores of heads with `key_dim` elements without RoPE."""
    return float((key_dim + rope.dim) ** -0.5 * _stretched(rope) ** 2)


def _stretched(rope: RopeConfig) -> float:
    """YaRN's factor on queries and on keys for an extended context (Peng et al., 2023, arXiv:2309.00071)."""
    if rope.type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
