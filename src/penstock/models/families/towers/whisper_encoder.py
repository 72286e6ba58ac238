"""Whisper's encoder (Radford et al., 2022, arXiv:2212.04356), also of Qwen2-Audio, Qwen-Omni, Voxtral and others.

x = gelu(conv2(gelu(conv1(log-mel)))) + positions      each of width 3; the second of stride 2
x += attention(norm(x)); x += mlp(norm(x))             layer norms; keys have no bias, all other maps do; GELU
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import FeedForwardSpec, NormSpec
from penstock.models.families.towers.reading import read_section
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, ConvolutionSpec, LayerSpec, SubLayer

_EPS = 1e-5
_FEWEST_WAVES = 4
"""Elements of the shortest vectors of sinusoids: two sines and two cosines."""
_UNUSED = (
    *("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "layerdrop", "init_std"),
    *("initializer_range", "vocab_size", "is_encoder_decoder", "use_cache", "apply_spec_augment"),
)


class LayerSizes(NamedTuple):
    """Sizes of the layers of an encoder, or of Whisper's text model."""

    name: str
    hidden: int
    num_layers: int
    heads: int
    inner: int


def checked(config: HFConfig, sizes: LayerSizes) -> LayerSizes:
    """
    Raises:
        CheckpointError: the hidden size cannot be divided among the heads.
    """
    if sizes.hidden % sizes.heads:
        raise config.unsupported("attention heads", sizes.heads, (f"a divisor of the hidden size {sizes.hidden}",))
    return sizes


def attention_of(sizes: LayerSizes) -> AttentionSpec:
    """Attention of Whisper's layers, causal."""
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


def mlp_of(sizes: LayerSizes) -> SubLayer[FeedForwardSpec]:
    """The MLP of Whisper's layers, with its norm."""
    mlp: FeedForwardSpec = PlainMLPSpec(sizes.hidden, sizes.inner, bias=True, up="fc1", down="fc2", activation="gelu")
    return SubLayer(mlp, layer_norm("final_layer_norm", sizes.hidden))


def layer_norm(name: str, size: int) -> NormSpec:
    return NormSpec(name, size, _EPS, bias=True)


def encoder_layers(sizes: LayerSizes) -> tuple[LayerSpec, ...]:
    """The encoder's layers, which attend to both sides."""
    attention = replace(attention_of(sizes), bidirectional=True)
    mixer = SubLayer(attention, layer_norm("self_attn_layer_norm", sizes.hidden))
    return tuple(LayerSpec(f"{sizes.name}.{index}", mixer, mlp_of(sizes)) for index in range(sizes.num_layers))


def convolutions(name: str, mels: int, hidden: int) -> tuple[ConvolutionSpec, ...]:
    """The convolutions before the layers of the encoder `name`."""
    return ConvolutionSpec(f"{name}.conv1", mels, hidden, 1), ConvolutionSpec(f"{name}.conv2", hidden, hidden, 2)


def read_encoder(
    config: HFConfig, read: Callable[[HFConfig, AudioEncoderSpec], AudioEncoderSpec]
) -> AudioEncoderSpec | None:
    """The encoder of `audio_config`, which `read` completes; None: there is none, or a setting of it is refused."""
    return read_section(
        config, "audio_config", "sound", "audio encoder", lambda audio: read(audio, whisper_encoder(audio))
    )


def whisper_encoder(audio: HFConfig) -> AudioEncoderSpec:
    """Read an encoder `audio_tower`, without its connector.

    Raises:
        CheckpointError: a setting is not supported.
    """
    audio.ignore(*_UNUSED)
    audio.expect("activation_function", "gelu")
    audio.expect("scale_embedding", False)
    hidden = _size(audio, "d_model", "hidden_size", 1280)
    heads = _size(audio, "encoder_attention_heads", "num_attention_heads", 20)
    layers = _size(audio, "encoder_layers", "num_hidden_layers", 32)
    inner = _size(audio, "encoder_ffn_dim", "intermediate_size", 5120)
    sizes = checked(audio, LayerSizes("audio_tower.layers", hidden, layers, heads, inner))
    audio.expect("head_dim", None, hidden // heads)
    audio.expect("num_key_value_heads", None, heads)
    mels, positions = audio.size("num_mel_bins", 128), audio.size("max_source_positions", 1500)
    return AudioEncoderSpec(
        num_mels=mels,
        num_positions=positions,
        hidden_size=hidden,
        convolutions=convolutions("audio_tower", mels, hidden),
        layers=encoder_layers(sizes),
        group=1,
        connector=(),
        positions="audio_tower.embed_positions.weight",
    )


def check_sinusoids(audio: HFConfig, hidden: int) -> None:
    """
    Raises:
        CheckpointError: sinusoids of so many elements have no rates.
    """
    if hidden % 2 or hidden < _FEWEST_WAVES:
        known = f"even numbers from {_FEWEST_WAVES} on, as its positions are sinusoids"
        raise audio.unsupported("d_model", hidden, (known,))


def _size(config: HFConfig, key: str, other: str, default: int) -> int:
    """The size at one of two keys: `transformers` has a name of its own for some, and files have either."""
    return config.size(key, config.size(other, default))
