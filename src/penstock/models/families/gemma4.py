"""Gemma 4: dense models, E-models with per-layer embeddings and shared keys, and mixtures of experts.

    x = sqrt(hidden_size) * embedding
    q, k, v = norm(Wq n), norm(Wk n), norm(Wv n)    n = norm(x); the last without weights
    x += norm(Wo attend(rope(q), rope(k), v))       five of six layers: over `sliding_window` keys
    x += norm(mlp(norm(x)))                         mixtures: norm(norm(mlp(norm(x))) + norm(experts(x)))
    x += norm(W (gelu(Wp x) * p)); x *= scalar      p: the layer's part of the token's per-layer embedding

Full-attention layers have wider heads than sliding-window layers, apply RoPE to a part of each head only, and may use
their keys as their values. The upper layers of E-models read the KV cache of the last lower layer of the same kind. In
some models the tokens of an image attend to each other in sliding-window layers. The audio tower is skipped.
"""

import re
from dataclasses import replace
from typing import Any

from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.per_layer import GatedPerLayerInputSpec, PerLayerEmbeddingSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import FeedForwardSpec
from penstock.layers.sum import Summand, SumSpec
from penstock.models.families.dense import Dense, check_heads, check_rotation, read_dense
from penstock.models.families.gemma2 import read_soft_cap
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.mixtures import read_routing
from penstock.models.families.towers.gemma_vision import gemma4_vision_tower
from penstock.models.families.towers.reading import read_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_TOWERS = (
    *("vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id", "boi_token_id"),
    *("eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Defaults for configs without `rope_parameters`."""


def gemma4_spec(config: HFConfig) -> ModelSpec:
    """Read a `Gemma4ForCausalLM`, or the text model of a `Gemma4ForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    text.expect("use_bidirectional_attention", None, "vision")  # applies to images only
    joins = text.find("use_bidirectional_attention", str) is not None
    dense = read_dense(
        text,
        max_position=131072,
        head_dim=256,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=262144,
        intermediate_size=9216,
        tied=True,
        activation="gelu_tanh",
        reads_rope=False,
    )
    per_layer = _per_layer(text, dense)
    stand_in = None if per_layer is None else text.size("pad_token_id", 0, least=0)
    tower = read_tower(config, lambda vision: gemma4_vision_tower(vision, dense.model.hidden_size, stand_in))
    attentions = [
        replace(attention, joins_images=tower is not None and joins and attention.window is not None)
        for attention in _attentions(text, dense)
    ]
    parts = _feed_forwards(text, dense, attentions)
    layers = (
        _layer(dense, index, attention, part, per_layer)
        for index, (attention, part) in enumerate(zip(attentions, parts, strict=True))
    )
    return replace(
        dense.model,
        layers=tuple(layers),
        embedding_multiplier=dense.model.hidden_size**0.5,
        logits_soft_cap=read_soft_cap(text, "final_logit_softcapping", None),
        per_layer=per_layer,
        names=_names(attentions),
        tower=tower,
    )


def _attentions(config: HFConfig, dense: Dense) -> list[AttentionSpec]:
    """The attention of each layer."""
    count = dense.num_layers
    windows = config.layer_windows(count, config.size("sliding_window", 512), lambda index: (index + 1) % 6 > 0)
    windows = (*windows[:-1], None)  # as in `transformers`: the last layer has full attention in any case
    bias, values_are_keys = config.get("attention_bias", False), config.get("attention_k_eq_v", False)
    sizes = _head_sizes(config, dense, windows, values_are_keys=values_are_keys)
    ropes = _Ropes(config, dense.model.max_position)
    first_shared = count - config.size("num_kv_shared_layers", 0, least=0)
    found: list[AttentionSpec] = []
    for index, (window, (head_dim, kv_heads)) in enumerate(zip(windows, sizes, strict=True)):
        check_heads(dense.attention.num_heads, kv_heads, config)
        names = dense.attention.names
        without_values = values_are_keys and window is None
        attention = replace(
            dense.attention,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            rope=ropes.of(_FULL if window is None else _SLIDING, head_dim),
            window=window,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm_eps=dense.norm_eps,
            value_norm=True,
            value_is_key=without_values,
            names=replace(names, qkv=names.qkv[:2]) if without_values else names,
        )
        if index >= first_shared:
            attention = replace(attention, shared=shared_layer(config, found[: max(first_shared, 0)], attention))
        found.append(attention)
    return found


def shared_layer(config: HFConfig, own: list[AttentionSpec], attention: AttentionSpec) -> int:
    """Index of the last layer of the same kind as `attention` among those with their own KV cache."""
    for index in range(len(own) - 1, -1, -1):
        if own[index].window == attention.window:
            if own[index].cache != attention.cache:  # `attention` does not share yet
                raise CheckpointError(f"{config.file}: layers that share a KV cache have heads of different sizes")
            return index
    raise CheckpointError(
        f"{config.file}: num_kv_shared_layers leaves a layer without a lower layer of its kind to share"
    )


def _head_sizes(
    config: HFConfig, dense: Dense, windows: tuple[int | None, ...], *, values_are_keys: bool
) -> list[tuple[int, int]]:
    """(head_dim, num_kv_heads) of each layer: from `per_layer_config`, or by the layer's kind."""
    usual = (dense.attention.head_dim, dense.attention.num_kv_heads)
    given = config.find("per_layer_config", dict)
    wide = (config.size("global_head_dim", 512), config.find_size("num_global_key_value_heads"))
    if given is None:
        wide_heads = wide[1] if wide[1] is not None and values_are_keys else usual[1]
        return [(wide[0], wide_heads) if window is None else usual for window in windows]
    sizes = [usual] * len(windows)
    for key in given:
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise config.unsupported("layer in per_layer_config", key, ("layer indices",))
        layer = config.section(config.section(given).need(key, dict))
        layer.refuse_others("setting in per_layer_config", ("head_dim", "num_key_value_heads"))
        if int(key) < len(sizes):
            sizes[int(key)] = (layer.size("head_dim", usual[0]), layer.size("num_key_value_heads", usual[1]))
    return sizes


class _Ropes:
    """The RoPE configs of the two kinds of layers."""

    def __init__(self, config: HFConfig, max_position: int) -> None:
        self._config, self._max_position = config, max_position
        if config.find("rope_scaling", dict):
            raise CheckpointError(
                f"rope_scaling in {config.file} names no kind of layer, and kinds have their own RoPE in this family: "
                "put its settings into full_attention of rope_parameters"
            )
        given = config.find("rope_parameters", dict) or _ROPES
        self._given = config.section(given)
        self._given.refuse_others("rope_parameters of layers", _ROPES)

    def of(self, kind: str, head_dim: int) -> RopeConfig:
        rope = self._config.rope_of(self._given.need(kind, dict), head_dim, self._max_position)
        check_rotation(rope, head_dim, self._config)
        return rope


def _per_layer(config: HFConfig, dense: Dense) -> PerLayerEmbeddingSpec | None:
    size = config.size("hidden_size_per_layer_input", 256, least=0)
    vocab_size = config.size("vocab_size_per_layer_input", 262144)
    if not size:
        return None
    if vocab_size < dense.model.vocab_size:
        raise CheckpointError(
            f"vocab_size_per_layer_input in {config.file} must be at least vocab_size, {dense.model.vocab_size}; "
            f"it is {vocab_size}"
        )
    return PerLayerEmbeddingSpec(vocab_size, dense.model.hidden_size, size, dense.num_layers, dense.norm_eps)


def _feed_forwards(config: HFConfig, dense: Dense, attentions: list[AttentionSpec]) -> list[SubLayer[FeedForwardSpec]]:
    """The feed-forward part of each layer, with its norms."""
    wide = replace(dense.mlp, intermediate_size=2 * dense.mlp.intermediate_size)
    is_wide = config.get("use_double_wide_mlp", False)
    mlps = [wide if is_wide and attention.shared is not None else dense.mlp for attention in attentions]
    before, after = dense.norm("pre_feedforward_layernorm"), dense.norm("post_feedforward_layernorm")
    mixture = _mixture(config, dense)
    if mixture is None:
        return [SubLayer(mlp, before, after) for mlp in mlps]
    return [SubLayer(_beside(dense, mlp, mixture), None, after) for mlp in mlps]


def _beside(dense: Dense, mlp: GatedMLPSpec, mixture: MixtureSpec) -> SumSpec:
    """An MLP and a mixture of experts in parallel, each with its own norm of the residual stream."""
    return SumSpec(
        dense.model.hidden_size,
        (
            Summand(mlp, dense.norm("pre_feedforward_layernorm"), dense.norm("post_feedforward_layernorm_1")),
            Summand(mixture, None, dense.norm("post_feedforward_layernorm_2")),
        ),
    )


def _mixture(config: HFConfig, dense: Dense) -> MixtureSpec | None:
    top_k, inner = config.find_size("top_k_experts"), config.find_size("moe_intermediate_size")
    experts = config.find_size("num_experts")
    if not config.get("enable_moe_block", False):
        return None
    if top_k is None or inner is None or experts is None:
        raise CheckpointError(
            f"{config.file} has enable_moe_block, but lacks num_experts, top_k_experts or moe_intermediate_size"
        )
    return MixtureSpec(
        dense.model.hidden_size,
        inner,
        read_routing(config, experts, top_k=top_k, renormalize=True),
        activation="gelu_tanh",
        expert_scales=True,
        norms_eps=dense.norm_eps,
        names=MixtureNames(router="router.proj", experts="experts"),
    )


def _layer(
    dense: Dense,
    index: int,
    attention: AttentionSpec,
    feed_forward: SubLayer[FeedForwardSpec],
    per_layer: PerLayerEmbeddingSpec | None,
) -> LayerSpec:
    layer = LayerSpec(
        name=f"model.layers.{index}",
        mixer=SubLayer(attention, dense.norm("input_layernorm"), dense.norm("post_attention_layernorm")),
        feed_forward=feed_forward,
        scale="layer_scalar",
    )
    if per_layer is None:
        return layer
    part = GatedPerLayerInputSpec(
        dense.model.hidden_size,
        per_layer.size,
        index * per_layer.size,
        per_layer.columns,
        "gelu_tanh",
    )
    return replace(layer, per_layer=SubLayer(part, None, dense.norm("post_per_layer_input_norm")))


def _names(attentions: list[AttentionSpec]) -> ModelNames:
    names = multimodal_names("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    unused = (
        rf"model\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        for index, attention in enumerate(attentions)
        if attention.shared is not None
    )
    return replace(names, ignored=(*names.ignored, *unused))
