"""LFM2: gated short convolutions, and attention with norms of heads in every few layers; gated MLPs.

n = norm(x)
b, c, v = Wi n
x += Wo (c * conv(b * v))                       each channel over the last 3 tokens; or attention(n), with norms
x += mlp(norm(x))                               of query and key heads
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.short_conv import ShortConvSpec
from penstock.layers.spec import FeedForwardSpec, MixerSpec, NormSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer

NAMES = AttentionNames(
    output="self_attn.out_proj", query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm"
)


def lfm2_spec(config: HFConfig) -> ModelSpec:
    """Read an `Lfm2ForCausalLM`."""
    dense = read_lfm2(config)
    mlp = lfm2_mlp(dense.model.hidden_size, lfm2_inner_size(config, dense.mlp.intermediate_size))
    return replace(
        dense.model,
        layers=tuple(lfm2_layer(dense, index, mixer, mlp) for index, mixer in enumerate(lfm2_mixers(config, dense))),
    )


def read_lfm2(config: HFConfig) -> Dense:
    """Read what LFM2's dense and mixture-of-experts models share, without the layers."""
    dense = read_dense(config, max_position=128_000, theta=1e6)
    eps = config.positive("norm_eps", 1e-5, or_zero=True)
    model = replace(
        dense.model,
        final_norm=NormSpec("model.embedding_norm", dense.model.hidden_size, eps),
        tie_embeddings=config.get("tie_word_embeddings", config.get("tie_embedding", True)),
    )
    return replace(dense, norm_eps=eps, attention=replace(dense.attention, qk_norm_eps=eps, names=NAMES), model=model)


def read_conv(config: HFConfig, dense: Dense, kernel: int) -> ShortConvSpec:
    """The convolution; `kernel` is the default of its width."""
    bias = config.get("conv_bias", False)
    return ShortConvSpec(dense.model.hidden_size, config.size("conv_L_cache", kernel, least=2), bias)


def lfm2_mixers(config: HFConfig, dense: Dense) -> list[MixerSpec]:
    """The mixer of each layer, by `layer_types` or `full_attn_idxs`."""
    conv = read_conv(config, dense, 3)
    kinds: dict[str, MixerSpec] = {"conv": conv, "full_attention": dense.attention}
    attending = config.find("full_attn_idxs", list)
    if attending is None:
        attending = list(range(dense.num_layers))
    default = ["full_attention" if index in attending else "conv" for index in range(dense.num_layers)]
    return [kinds[kind] for kind in config.layer_kinds(dense.num_layers, tuple(kinds), default)]


def lfm2_mlp(hidden_size: int, inner_size: int) -> GatedMLPSpec:
    return GatedMLPSpec(hidden_size, inner_size, gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2")


def lfm2_inner_size(config: HFConfig, given: int) -> int:
    """The MLP's inner size; the config may hold the size before LFM2's adjustment."""
    given = config.size("block_ff_dim", given)
    unit, factor = config.size("block_multiple_of", 256), config.positive("block_ffn_dim_multiplier", 1.0)
    if not config.get("block_auto_adjust_ff_dim", True):
        return given
    return -(-int(factor * int(2 * given / 3)) // unit) * unit


def lfm2_layer(dense: Dense, index: int, mixer: MixerSpec, feed_forward: FeedForwardSpec) -> LayerSpec:
    """Layer `index` with LFM2's names."""
    return LayerSpec(
        f"model.layers.{index}",
        SubLayer(mixer, dense.norm("operator_norm")),
        SubLayer(feed_forward, dense.norm("ffn_norm")),
    )
