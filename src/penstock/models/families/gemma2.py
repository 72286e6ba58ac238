"""Gemma 2, VaultGemma: norms before and after each part, soft caps, a sliding window in every other layer.

x = sqrt(hidden_size) * embedding
x += norm(attention(norm(x)))                   norms multiply by 1 + weight; scores = 50 * tanh(scores / 50);
x += norm(mlp(norm(x)))                         every other layer over `sliding_window` keys; gelu for silu

logits = 30 * tanh(W norm(x) / 30)                     VaultGemma: no norms after the parts
"""

from dataclasses import replace
from functools import partial

from penstock.layers.attention import AttentionSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer


def gemma2_spec(config: HFConfig) -> ModelSpec:
    """Read a `Gemma2ForCausalLM`."""
    config.expect("use_bidirectional_attention", None, False)
    dense = read_gemma(config, max_position=8192, vocab_size=256000, soft_caps=(50.0, 30.0))
    attention = replace(dense.attention, rope=config.rope(dense.attention.head_dim, dense.model.max_position))
    window = config.size("sliding_window", 4096)
    windows = config.layer_windows(dense.num_layers, window, lambda index: index % 2 == 0)
    layers = tuple(
        gemma_layer(dense, index, replace(attention, window=layer_window)) for index, layer_window in enumerate(windows)
    )
    return replace(dense.model, layers=layers)


def vault_gemma_spec(config: HFConfig) -> ModelSpec:
    """Read a `VaultGemmaForCausalLM`: Gemma 2 without norms after the parts."""
    model = gemma2_spec(config)
    return replace(model, layers=tuple(map(_without_norms_after, model.layers)))


def _without_norms_after(layer: LayerSpec) -> LayerSpec:
    assert layer.mixer is not None
    assert layer.feed_forward is not None
    return replace(
        layer,
        mixer=replace(layer.mixer, norm_after=None),
        feed_forward=replace(layer.feed_forward, norm_after=None),
    )


def read_gemma(
    config: HFConfig, *, max_position: int, vocab_size: int, soft_caps: tuple[float | None, float | None]
) -> Dense:
    """Read what Gemma 2 and 3 share: default sizes, scaled embeddings, norms that multiply by 1 + weight.

    The attention has no RoPE yet.

    Args:
        soft_caps: defaults of the soft caps on scores and logits; null in the config means no cap.
    """
    dense = read_dense(
        config,
        max_position=max_position,
        head_dim=256,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=vocab_size,
        tied=True,
        activation="gelu_tanh",
        reads_rope=False,
    )
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention,
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=read_soft_cap(config, "attn_logit_softcapping", soft_caps[0]),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_offset=1.0,
    )
    model = replace(
        dense.model,
        final_norm=replace(dense.model.final_norm, offset=1.0),
        embedding_multiplier=dense.model.hidden_size**0.5,
        logits_soft_cap=read_soft_cap(config, "final_logit_softcapping", soft_caps[1]),
    )
    return replace(dense, attention=attention, model=model)


def read_soft_cap(config: HFConfig, key: str, default: float | None) -> float | None:
    """Read a soft cap: `default` if the key is absent, None if it is null."""
    if config.is_null(key) or (default is None and not config.has(key)):
        config.find(key, float)
        return None
    return config.positive(key, default or 1.0)


def gemma_layer(dense: Dense, index: int, attention: AttentionSpec) -> LayerSpec:
    """A layer with norms before and after each part, which multiply by 1 + weight."""
    norm = partial(dense.norm, offset=1.0)
    return LayerSpec(
        name=f"model.layers.{index}",
        mixer=SubLayer(attention, norm("input_layernorm"), norm("post_attention_layernorm")),
        feed_forward=SubLayer(dense.mlp, norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")),
    )
