"""Qwen3-Omni, the thinker: Qwen3's mixture of experts with an audio encoder and a vision tower.

x += attention(norm(x)); x += experts(norm(x))     Qwen3's
features = W2 gelu(W1 norm(positions))             of the encoder, in place of the embeddings of audio tokens

The encoder has Whisper's layers after convolutions over mels and frames, in chunks of a second; its positions see those
of eight. A sound below a second is filled with zeros, which `transformers` does beside a longer one only. The vision
tower and its taps are Qwen3-VL's. A sound's tokens have the positions of text, one each. The talker is skipped.
"""

from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.qwen2_5_omni import TOWERS, whole_omni
from penstock.models.families.qwen3_moe import qwen3_mixture
from penstock.models.families.qwen3_vl import with_vision
from penstock.models.families.towers.qwen_vision import MergerNames
from penstock.models.families.towers.whisper_encoder import check_sinusoids, layer_norm, read_encoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, ModelSpec, ProjectionSpec, SpectrogramSpec

_MERGERS = MergerNames("visual.merger", "visual.merger_list", "ln_q", "mlp.0", "mlp.2")
_LONGEST = 3000
"""Frames that are encoded at a time, at most: sounds are cut at windows, which do not see each other."""


def qwen3_omni_moe_spec(config: HFConfig) -> ModelSpec:
    """Read the thinker of a `Qwen3OmniMoeForConditionalGeneration`."""
    return whole_omni(config, qwen3_omni_moe_thinker_spec)


def qwen3_omni_moe_thinker_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3OmniMoeThinkerForConditionalGeneration`."""
    text = config.text(*TOWERS)
    text.expect("norm_topk_prob", True)
    model = replace(qwen3_mixture(text, renormalize=True), names=multimodal_names("audio_tower", "visual"))

    def complete(audio: HFConfig, encoder: AudioEncoderSpec) -> AudioEncoderSpec:
        audio.ignore("conv_chunksize")  # chunks that are convolved side by side
        audio.expect("output_dim", model.hidden_size)
        check_sinusoids(audio, encoder.hidden_size)
        chunk, seen = 2 * audio.size("n_window", 50), audio.size("n_window_infer", 800)
        if seen % chunk or seen > _LONGEST:
            raise audio.unsupported("n_window_infer", seen, (f"multiples of {chunk} up to {_LONGEST}",))
        names, size = ("conv2d1", "conv2d2", "conv2d3"), encoder.hidden_size
        first, second, third = (f"audio_tower.{name}" for name in names)
        channels = audio.size("downsample_hidden_size", 480)
        spectrogram = SpectrogramSpec((first, second, third), channels, "audio_tower.conv_out", chunk)
        connector = (
            layer_norm("audio_tower.ln_post", size),
            ProjectionSpec("audio_tower.proj1", size, size, bias=True, activation="gelu"),
            ProjectionSpec("audio_tower.proj2", size, model.hidden_size, bias=True),
        )
        window = seen // chunk * spectrogram.reduced(chunk)
        return replace(
            encoder,
            num_positions=_LONGEST // seen * window,
            convolutions=(),
            spectrogram=spectrogram,
            connector=connector,
            positions=None,
            window=window,
        )

    return with_vision(replace(model, audio_encoder=read_encoder(config, complete)), config, text, _MERGERS)
