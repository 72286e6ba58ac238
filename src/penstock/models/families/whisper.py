"""Whisper (Radford et al., 2022, arXiv:2212.04356): transcribes windows of 30 seconds; also Distil-Whisper.

tower    x = convolutions(log-mel) + positions;  x += attention(norm(x)); x += mlp(norm(x));  norm
text     x = embedding + position embedding
         x += attention(norm(x)); x += cross-attention(norm(x)) to the tower's output; x += mlp(norm(x))

Layer norms; keys have no bias, all other maps do; GELU; the output projection is the embedding.
"""

from penstock.layers.cross_attention import CrossAttentionSpec
from penstock.layers.spec import MixerSpec
from penstock.models.families.towers.whisper_encoder import (
    LayerSizes,
    attention_of,
    checked,
    convolutions,
    encoder_layers,
    layer_norm,
    mlp_of,
)
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioTowerSpec, LayerSpec, ModelNames, ModelSpec, SubLayer, TableSpec

_TRAINING = ("dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "apply_spec_augment", "mask_time_prob")
_UNUSED = (
    *("mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length"),
    *("mask_feature_min_masks", "median_filter_width", "use_weighted_layer_sum", "classifier_proj_size"),
    *("activation_dropout", "attention_dropout", "num_hidden_layers", "max_length", "forced_decoder_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id"),  # generation_config.json has them
    *("is_encoder_decoder", "lang_ids", "return_dict", "tokenizer_class"),
)


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
        final_norm=layer_norm("model.decoder.layer_norm", hidden),
        tie_embeddings=config.get("tie_word_embeddings", True),
        positions=TableSpec("model.decoder.embed_positions", context),
        names=ModelNames("model.decoder.embed_tokens", "proj_out"),
        audio=_tower(config, hidden, readers, context),
    )


def _sizes(config: HFConfig, side: str, hidden: int) -> LayerSizes:
    heads, layers = config.size(f"{side}_attention_heads", 6), config.size(f"{side}_layers", 4)
    inner = config.size(f"{side}_ffn_dim", 1536)
    return checked(config, LayerSizes(f"model.{side}.layers", hidden, layers, heads, inner))


def _mixer(part: MixerSpec, norm: str, size: int) -> SubLayer[MixerSpec]:
    return SubLayer(part, layer_norm(norm, size))


def _text_layers(sizes: LayerSizes, cross: CrossAttentionSpec, index: int) -> tuple[LayerSpec, LayerSpec]:
    """A layer of the text model as two: self-attention; cross-attention and the MLP."""
    name, hidden = f"{sizes.name}.{index}", sizes.hidden
    first = _mixer(attention_of(sizes), "self_attn_layer_norm", hidden)
    second = _mixer(cross, "encoder_attn_layer_norm", hidden)
    return LayerSpec(name, first, None), LayerSpec(name, second, mlp_of(sizes))


def _tower(
    config: HFConfig, hidden: int, readers: tuple[tuple[str, CrossAttentionSpec], ...], context: int
) -> AudioTowerSpec:
    mels, positions = config.size("num_mel_bins", 80), config.size("max_source_positions", 1500)
    if positions < context:  # a step's queries count as the last of so many positions
        raise config.unsupported("max_source_positions", positions, (f"at least max_target_positions, {context}",))
    sizes = _sizes(config, "encoder", hidden)
    return AudioTowerSpec(
        num_mels=mels,
        num_positions=positions,
        hidden_size=hidden,
        convolutions=convolutions("model.encoder", mels, hidden),
        positions="model.encoder.embed_positions.weight",
        layers=encoder_layers(sizes),
        last_norm=layer_norm("model.encoder.layer_norm", hidden),
        readers=readers,
    )
