"""Qwen3.5 and 3.6: gated delta nets in three of four layers, gated attention in the others.

    q, k, v = conv(Wqkv n); g, b, a = Wg n, Wb n, Wa n                       n = norm(x); one state S for each head
    S = exp(-A softplus(a + dt)) S
    S += sigmoid(b) k (v - kᵀ S)ᵀ                   k and q have length 1
    x += Wo (norm(qᵀ S) * silu(g))                  or attention: q and k with norms, times sigmoid of a gate
    x += mlp(norm(x))                               or experts with a gated shared expert

Norms multiply by 1 + weight; RoPE rotates a quarter of each head, in multimodal checkpoints by positions on three axes.
The multi-token prediction head (`mtp.*`) has one layer, with attention.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from penstock.errors import CheckpointError
from penstock.layers.gated_delta_net import GatedDeltaNetSpec
from penstock.layers.mixture import MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.spec import FeedForwardSpec, MixerSpec, NormSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.mixtures import read_routing
from penstock.models.families.towers.qwen_vision import qwen3_vision_tower
from penstock.models.families.towers.reading import read_tower, with_axes
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, MTPSpec, SubLayer

_TOWERS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def qwen3_5_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3_5ForCausalLM`, or the text model of a `Qwen3_5ForConditionalGeneration`."""
    return _qwen3_5(config, lambda text, dense: dense.mlp)


def qwen3_5_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3_5MoeForCausalLM`, or the text model of a `Qwen3_5MoeForConditionalGeneration`."""
    return _qwen3_5(config, lambda text, dense: qwen_mixture(text, dense, experts=256, renormalize=True))


def _qwen3_5(config: HFConfig, feed_forward: Callable[[HFConfig, Dense], FeedForwardSpec]) -> ModelSpec:
    text = config.text(*_TOWERS)
    text.expect("attn_output_gate", True)
    text.expect("mamba_ssm_dtype", "float32")
    text.ignore("mlp_only_layers")
    dense = read_hybrid(text)
    part = feed_forward(text, dense)
    own_embedding = text.get("mtp_use_dedicated_embeddings", False)
    has_head = text.size("mtp_num_hidden_layers", 0, least=0) > 0 and not own_embedding
    names = multimodal_names("visual")
    model = replace(
        dense.model,
        layers=tuple(hybrid_layer(dense, index, mixer, part) for index, mixer in enumerate(delta_mixers(text, dense))),
        names=replace(names, ignored=(*names.ignored, r"mtp\..*")),
        mtp=mtp_head(dense, part) if has_head else None,
    )
    tower = read_tower(config, lambda vision: qwen3_vision_tower(vision, model.hidden_size, taps=()))
    return model if tower is None else replace(with_axes(model, text, [11, 11, 10]), tower=tower)


def read_hybrid(config: HFConfig) -> Dense:
    """Read what Qwen3-Next and Qwen3.5 share, without the layers."""
    dense = read_dense(config, max_position=32768, head_dim=256, partial_rotary=0.25, intermediate_size=1)
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=dense.norm_eps,
        qk_norm_offset=1.0,
        output_gate=True,
    )
    model = replace(dense.model, final_norm=replace(dense.model.final_norm, offset=1.0))
    return replace(dense, attention=attention, model=model)


def delta_mixers(config: HFConfig, dense: Dense, *, together: Literal["none", "all"] = "none") -> list[MixerSpec]:
    """The mixer of each layer, by `layer_types` or `full_attention_interval`.

    Raises:
        CheckpointError: the number of value heads is not a multiple of the number of key heads.
    """
    delta = GatedDeltaNetSpec(
        hidden_size=dense.model.hidden_size,
        key_heads=config.size("linear_num_key_heads", 16),
        value_heads=config.size("linear_num_value_heads", 32),
        key_dim=config.size("linear_key_head_dim", 128),
        value_dim=config.size("linear_value_head_dim", 128),
        kernel=config.size("linear_conv_kernel_dim", 4, least=2),
        norm_eps=dense.norm_eps,
        together=together,
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"{config.file}: {delta.value_heads} value heads cannot share {delta.key_heads} key heads evenly"
        )
    kinds: dict[str, MixerSpec] = {"linear_attention": delta, "full_attention": dense.attention}
    interval = config.size("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(dense.num_layers)]
    return [kinds[kind] for kind in config.layer_kinds(dense.num_layers, tuple(kinds), default)]


def mtp_head(dense: Dense, feed_forward: FeedForwardSpec) -> MTPSpec:
    """The multi-token prediction head; if the checkpoint has several layers of it, the first."""

    def norm(name: str) -> NormSpec:
        return dense.norm(f"mtp.{name}", offset=1.0)

    return MTPSpec(
        layer=replace(hybrid_layer(dense, 0, dense.attention, feed_forward), name="mtp.layers.0"),
        embedding_norm=norm("pre_fc_norm_embedding"),
        hidden_norm=norm("pre_fc_norm_hidden"),
        projection="mtp.fc",
        norm=norm("norm"),
    )


def hybrid_layer(dense: Dense, index: int, mixer: MixerSpec, feed_forward: FeedForwardSpec) -> LayerSpec:
    """Layer `index`, with norms that multiply by 1 + weight."""
    layer = dense.layer(index, mixer, feed_forward)
    assert layer.mixer is not None
    assert layer.feed_forward is not None
    first, second = layer.mixer.norm, layer.feed_forward.norm
    assert first is not None
    assert second is not None
    return replace(
        layer,
        mixer=SubLayer(mixer, replace(first, offset=1.0)),
        feed_forward=SubLayer(feed_forward, replace(second, offset=1.0)),
    )


def qwen_mixture(
    config: HFConfig,
    dense: Dense,
    *,
    experts: int,
    renormalize: bool,
    top_k: int | None = None,
    inner: int = 512,
    shared_inner: int = 512,
) -> MixtureSpec:
    """A mixture of experts with a gated shared expert.

    Args:
        experts, top_k, inner, shared_inner: defaults of the config's keys; `top_k` None: the key is required.
    """
    hidden = dense.model.hidden_size
    shared = GatedMLPSpec(
        hidden,
        config.size("shared_expert_intermediate_size", shared_inner),
        gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down="mlp.shared_expert.down_proj",
    )
    routing = read_routing(config, config.size("num_experts", experts), top_k, renormalize=renormalize)
    return MixtureSpec(hidden, config.size("moe_intermediate_size", inner), routing, shared=shared, shared_gate=True)
