"""Kimi Linear (48B-A3B): delta attention in three of four layers, latent attention without RoPE in others, experts.

x += mixer(norm(x))                             a gated delta rule with a decay for each channel of the keys (KDA), or
                                                DeepSeek's latent attention, without RoPE
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + correction
x += scaling * (sum of s[e] / sum(s) * mlp_e(n)) + shared_mlp(n)         the first layer: mlp(n)
"""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.layers.kimi_delta import KimiDeltaSpec
from penstock.layers.latent import LatentAttentionSpec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.spec import MixerSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.mixtures import read_routing, sparse_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_NAMES = MixtureNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    correction="block_sparse_moe.gate.e_score_correction_bias",
)


def kimi_linear_spec(config: HFConfig) -> ModelSpec:
    """Read a `KimiLinearForCausalLM`."""
    config.expect("moe_router_activation_func", "sigmoid")
    config.expect("moe_layer_freq", 1)
    config.expect("mla_use_nope", True)
    config.expect("num_nextn_predict_layers", 0, None)
    config.ignore("use_grouped_topk", "rope_theta", "rope_scaling", "head_dim")
    dense = read_dense(
        config,
        max_position=config.size("model_max_length", 1048576),
        num_kv_heads=32,
        norm_eps=1e-5,
        reads_rope=False,
    )
    mixers = _mixers(config, dense)
    first = config.size("first_k_dense_replace", 1, least=0)
    sparse = sparse_layers(config, dense.num_layers, lambda index: index >= first)
    mixture = _mixture(config, dense.model.hidden_size)
    layers = tuple(
        dense.layer(index, mixer, mixture if has else None)
        for index, (mixer, has) in enumerate(zip(mixers, sparse, strict=True))
    )
    # As `transformers` names MLPs when it saves a model.
    resaved = tuple(
        (f"model.layers.{index}.block_sparse_moe.{part}.", f"model.layers.{index}.mlp.{part}.")
        for index, has in enumerate(sparse)
        for part in ("gate_proj", "up_proj", "down_proj")
        if not has
    )
    return replace(dense.model, layers=layers, names=replace(dense.model.names, prefixes=resaved))


def _mixers(config: HFConfig, dense: Dense) -> list[MixerSpec]:
    """By `linear_attn_config`, whose layers count from 1, or by the keys that `transformers` writes."""
    given = config.section(config.find("linear_attn_config", dict) or {}, "linear_attn_config")
    delta = KimiDeltaSpec(
        dense.model.hidden_size,
        heads=given.size("num_heads", config.size("linear_num_heads", 32)),
        head_dim=given.size("head_dim", config.size("linear_head_dim", 128)),
        kernel=given.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4, least=2), least=2),
        norm_eps=dense.norm_eps,
    )
    kinds: dict[str, MixerSpec] = {"linear_attention": delta, "full_attention": _latent(config, dense)}
    attending, others = (given.find(key, list) for key in ("full_attn_layers", "kda_layers"))
    count = dense.num_layers
    default = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    if attending is not None and others is not None:
        if sorted((*attending, *others), key=str) != sorted(range(1, count + 1), key=str):
            raise CheckpointError(
                f"full_attn_layers and kda_layers in {config.file} must name each of the layers 1 to {count} once"
            )
        default = ["full_attention" if index + 1 in attending else "linear_attention" for index in range(count)]
    return [kinds[kind] for kind in config.layer_kinds(count, tuple(kinds), default)]


def _latent(config: HFConfig, dense: Dense) -> LatentAttentionSpec:
    key_dim, shared = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
    config.expect("qk_head_dim", key_dim + shared, None)
    return LatentAttentionSpec(
        hidden_size=dense.model.hidden_size,
        num_heads=dense.attention.num_heads,
        rank=config.size("kv_lora_rank", 512),
        key_dim=key_dim,
        value_dim=config.size("v_head_dim", 128),
        rope=None,
        unrotated=shared,
        scale=float((key_dim + shared) ** -0.5),
        query_rank=config.find_size("q_lora_rank"),
        paired=False,
        bias=config.get("attention_bias", False),
    )


def _mixture(config: HFConfig, hidden: int) -> MixtureSpec:
    routing = read_routing(
        config,
        config.size("num_experts", 256),
        8,
        top_k_key="num_experts_per_token",
        score="sigmoid",
        renormalize=config.get("moe_renormalize", True),
        epsilon=1e-20,
        scaling=config.positive("routed_scaling_factor", 2.446),
        groups=config.size("num_expert_group", 1),
        top_groups=config.size("topk_group", 1),
        group_tops=2,
    )
    inner = config.size("moe_intermediate_size", 1024)
    shared = GatedMLPSpec(
        hidden,
        inner * config.size("num_shared_experts", 1),
        gate_up=("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
        down="block_sparse_moe.shared_experts.down_proj",
    )
    return MixtureSpec(hidden, inner, routing, correction=True, shared=shared, names=_NAMES)
