"""Nemotron-H and Nemotron 3: layers of one part: Mamba 2, attention without RoPE, an MLP, or experts without gates.

    x += part(norm(x)), one of:
        Mamba 2
        Wo attend(Wq n, Wk n, Wv n)                 no RoPE
        Wd relu(Wu n)²
        scaling * sum of s[e] / sum(s) * Wd relu(Wu n)² + shared             s = sigmoid(Wr n), chosen as in V3

Mamba's time steps are limited by `time_step_limit`, as in training. (`transformers` applies no limits in decoding, and
`time_step_min` as the lower limit in prefill.)
"""

from collections.abc import Mapping
from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mamba2 import Mamba2Spec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import FeedForwardSpec, MixerSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.granite_moe_hybrid import step_limits
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]
ATTENTION_NAMES = AttentionNames(qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), output="mixer.o_proj")
EXPERT_NAMES = MixtureNames(
    router="mixer.gate",
    experts="mixer.experts",
    correction="mixer.gate.e_score_correction_bias",
    narrow="mixer.fc1_latent_proj",
    widen="mixer.fc2_latent_proj",
)


def nemotron_h_spec(config: HFConfig) -> ModelSpec:
    """Read a `NemotronHForCausalLM`."""
    _refuse_what_is_not_computed(config)
    kinds = _layer_kinds(config)
    if not {"linear_attention", "full_attention"} & set(kinds):
        raise CheckpointError(f"{config.file}: layers_block_type must have a layer of attention or of Mamba")
    dense = read_dense(
        config,
        max_position=4096,
        head_dim=128,
        num_layers=len(kinds),
        num_heads=32,
        num_kv_heads=8,
        vocab_size=131072,
        intermediate_size=21504,
        reads_rope=False,
    )
    if len(kinds) != dense.num_layers:
        raise config.unsupported("num_hidden_layers", dense.num_layers, (f"{len(kinds)}, as layers are named",))
    dense = replace(dense, norm_eps=config.positive("layer_norm_epsilon", 1e-5, or_zero=True))
    mixers, others = _mixers(config, dense, set(kinds)), _feed_forwards(config, dense, set(kinds))
    return replace(
        dense.model,
        layers=tuple(_layer(dense, index, mixers.get(kind), others.get(kind)) for index, kind in enumerate(kinds)),
        final_norm=dense.norm("backbone.norm_f"),
        names=ModelNames("backbone.embeddings", ignored=(r"mtp.*",), prefixes=(("model.", "backbone."),)),
    )


def _refuse_what_is_not_computed(config: HFConfig) -> None:
    config.expect("mlp_hidden_act", "relu2")
    config.expect("mamba_hidden_act", "silu")
    config.expect("sliding_window", None)
    config.expect("tie_word_embeddings", False)
    config.expect("attention_bias", False)
    config.expect("residual_in_fp32", False)
    config.ignore("num_logits_to_keep", "use_mamba_kernels", "chunk_size", "mamba_ssm_cache_dtype", "expand")
    config.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "mamba_proj_bias")
    config.ignore("moe_shared_expert_overlap", "n_shared_experts", "rescale_prenorm_residual", "rms_norm_eps")
    config.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _layer_kinds(config: HFConfig) -> list[str]:
    """The kind of each layer, by `layers_block_type` or by the letters of `hybrid_override_pattern`."""
    pattern = config.find("hybrid_override_pattern", str)
    named = config.find("layers_block_type", list) or config.find("layer_types", list)
    if named is None:
        if pattern is None:
            return _DEFAULT
        for letter in pattern:
            if letter not in _PATTERN:
                raise config.unsupported("hybrid_override_pattern", pattern, tuple(_PATTERN))
        return [_PATTERN[letter] for letter in pattern]
    kinds = [_LEGACY.get(kind, kind) if isinstance(kind, str) else kind for kind in named]
    for kind in kinds:
        if kind not in _PATTERN.values():
            raise config.unsupported("layers_block_type", kind, tuple(_PATTERN.values()))
    return kinds


def _layer(dense: Dense, index: int, mixer: MixerSpec | None, feed_forward: FeedForwardSpec | None) -> LayerSpec:
    norm = dense.norm("norm")
    return LayerSpec(
        f"backbone.layers.{index}",
        None if mixer is None else SubLayer(mixer, norm),
        None if feed_forward is None else SubLayer(feed_forward, norm),
    )


def _mixers(config: HFConfig, dense: Dense, kinds: set[str]) -> Mapping[str, MixerSpec]:
    attention: AttentionSpec = replace(dense.attention, names=ATTENTION_NAMES)
    heads, groups = config.size("mamba_num_heads", 128), config.size("n_groups", 8)
    if "linear_attention" in kinds and heads % groups:
        raise config.unsupported("n_groups", groups, (f"a divisor of mamba_num_heads {heads}",))
    shortest, longest = step_limits(config)
    mamba = Mamba2Spec(
        hidden_size=dense.model.hidden_size,
        heads=heads,
        head_dim=config.size("mamba_head_dim", 64),
        groups=groups,
        state_size=config.size("ssm_state_size", 128),
        kernel=config.size("conv_kernel", 4, least=2),
        norm_eps=dense.norm_eps,
        norm_groups=groups,
        shortest_step=shortest,
        longest_step=longest,
        bias=config.get("use_bias", False),
        conv_bias=config.get("use_conv_bias", True),
        prefix="mixer",
    )
    return {"linear_attention": mamba, "full_attention": attention}


def _feed_forwards(config: HFConfig, dense: Dense, kinds: set[str]) -> Mapping[str, FeedForwardSpec]:
    bias = config.get("mlp_bias", False)
    mlp = _mlp(dense, dense.mlp.intermediate_size, bias, "mixer")
    inner = config.size("moe_intermediate_size", 7688)
    shared = _mlp(dense, config.size("moe_shared_expert_intermediate_size", 7688), bias, "mixer.shared_experts")
    latent = config.find_size("moe_latent_size")
    experts, groups = config.size("n_routed_experts", 8), config.size("n_group", 1)
    top_groups, top_k = config.size("topk_group", 1), config.size("num_experts_per_tok", 2)
    renormalize, scaling = config.get("norm_topk_prob", True), config.positive("routed_scaling_factor", 1.0)
    if "moe" not in kinds:
        return {"mlp": mlp}
    routing = read_routing(
        config,
        experts,
        top_k,
        score="sigmoid",
        renormalize=renormalize,
        epsilon=1e-20,
        scaling=scaling,
        groups=groups,
        top_groups=top_groups,
        group_tops=2,
    )
    mixture = MixtureSpec(
        dense.model.hidden_size,
        inner,
        routing,
        activation="relu2",
        correction=True,
        shared=shared,
        latent=latent,
        latent_bias=latent is not None and bias,
        names=EXPERT_NAMES,
    )
    return {"mlp": mlp, "moe": mixture}


def _mlp(dense: Dense, inner: int, bias: bool, prefix: str) -> PlainMLPSpec:
    return PlainMLPSpec(dense.model.hidden_size, inner, bias, f"{prefix}.up_proj", f"{prefix}.down_proj")
