"""Whisper (Radford et al., 2022, arXiv:2212.04356): transcribes windows of 30 seconds; also Distil-Whisper.

tower    x = convolutions(log-mel) + positions;  x += attention(norm(x)); x += mlp(norm(x));  norm
text     x = embedding + position embedding
         x += attention(norm(x)); x += cross-attention(norm(x)) to the tower's output; x += mlp(norm(x))

Layer norms; keys have no bias, all other maps do; GELU; the output projection is the embedding.
"""

from dataclasses import replace
from typing import NamedTuple

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.cross_attention import CrossAttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import FeedForwardSpec, MixerSpec, NormSpec
from penstock.models.hf_config import HFConfig
from penstock.models.spec import (
    AudioTowerSpec,
    ConvolutionSpec,
    LayerSpec,
    ModelNames,
    ModelSpec,
    SubLayer,
    TableSpec,
)

_EPS = 1e-5
_TRAINING = ("dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "apply_spec_augment", "mask_time_prob")
_UNUSED = (
    *("mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length"),
    *("mask_feature_min_masks", "median_filter_width", "use_weighted_layer_sum", "classifier_proj_size"),
    *("activation_dropout", "attention_dropout", "num_hidden_layers", "max_length", "forced_decoder_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id"),  # generation_config.json has them
    *("is_encoder_decoder", "lang_ids", "return_dict", "tokenizer_class"),
)


class _Sizes(NamedTuple):
    """Sizes of the layers of the tower, or of the text model."""

    name: str
    hidden: int
    num_layers: int
    heads: int
    inner: int


def whisper_spec(config: HFConfig) -> ModelSpec:
    """Read a `WhisperForConditionalGeneration`."""
    config.ignore(*_TRAINING, *_UNUSED)
    config.expect("activation_function", "gelu")
    config.expect("scale_embedding", False)
    hidden, context = config.size("d_model", 384), config.size("max_target_positions", 448)
    text = _sizes(config, "decoder", hidden)
    cross = CrossAttentionSpec(hidden, text.heads, hidden // text.heads, "encoder_attn")
    layers = tuple(layer for index in range(text.num_layers) for layer in _text_layers(text, cross, index))
    readers = tuple((f"model.decoder.layers.{index}", cross) for index in range(text.num_layers))
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 51865),
        hidden_size=hidden,
        max_position=context,
        layers=layers,
        final_norm=_norm("model.decoder.layer_norm", hidden),
        tie_embeddings=config.get("tie_word_embeddings", True),
        positions=TableSpec("model.decoder.embed_positions", context),
        names=ModelNames("model.decoder.embed_tokens", "proj_out"),
        audio=_tower(config, hidden, readers, context),
    )


def _sizes(config: HFConfig, side: str, hidden: int) -> _Sizes:
    heads = config.size(f"{side}_attention_heads", 6)
    if hidden % heads:
        raise config.unsupported(f"{side}_attention_heads", heads, (f"a divisor of d_model {hidden}",))
    layers, inner = config.size(f"{side}_layers", 4), config.size(f"{side}_ffn_dim", 1536)
    return _Sizes(f"model.{side}.layers", hidden, layers, heads, inner)


def _attention(sizes: _Sizes) -> AttentionSpec:
    head_dim = sizes.hidden // sizes.heads
    return AttentionSpec(
        sizes.hidden,
        sizes.heads,
        sizes.heads,
        head_dim,
        head_dim**-0.5,
        None,
        qkv_bias=True,
        key_bias=False,
        output_bias=True,
        names=AttentionNames(output="self_attn.out_proj"),
    )


def _mlp(sizes: _Sizes) -> SubLayer[FeedForwardSpec]:
    mlp: FeedForwardSpec = PlainMLPSpec(sizes.hidden, sizes.inner, bias=True, up="fc1", down="fc2", activation="gelu")
    return SubLayer(mlp, _norm("final_layer_norm", sizes.hidden))


def _mixer(part: MixerSpec, norm: str, size: int) -> SubLayer[MixerSpec]:
    return SubLayer(part, _norm(norm, size))


def _norm(name: str, size: int) -> NormSpec:
    return NormSpec(name, size, _EPS, bias=True)


def _text_layers(sizes: _Sizes, cross: CrossAttentionSpec, index: int) -> tuple[LayerSpec, LayerSpec]:
    """A layer of the text model as two: self-attention; cross-attention and the MLP."""
    name, hidden = f"{sizes.name}.{index}", sizes.hidden
    first = _mixer(_attention(sizes), "self_attn_layer_norm", hidden)
    second = _mixer(cross, "encoder_attn_layer_norm", hidden)
    return LayerSpec(name, first, None), LayerSpec(name, second, _mlp(sizes))


def _tower(
    config: HFConfig, hidden: int, readers: tuple[tuple[str, CrossAttentionSpec], ...], context: int
) -> AudioTowerSpec:
    mels, positions = config.size("num_mel_bins", 80), config.size("max_source_positions", 1500)
    if positions < context:  # a step's queries count as the last of so many positions
        raise config.unsupported("max_source_positions", positions, (f"at least max_target_positions, {context}",))
    sizes = _sizes(config, "encoder", hidden)
    attention = _mixer(replace(_attention(sizes), bidirectional=True), "self_attn_layer_norm", hidden)
    return AudioTowerSpec(
        num_mels=mels,
        num_positions=positions,
        hidden_size=hidden,
        convolutions=(
            ConvolutionSpec("model.encoder.conv1", mels, hidden, 1),
            ConvolutionSpec("model.encoder.conv2", hidden, hidden, 2),
        ),
        positions="model.encoder.embed_positions.weight",
        layers=tuple(LayerSpec(f"{sizes.name}.{index}", attention, _mlp(sizes)) for index in range(sizes.num_layers)),
        last_norm=_norm("model.encoder.layer_norm", hidden),
        readers=readers,
    )
