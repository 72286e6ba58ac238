"""Tiny models that take sounds in prompts, made by `transformers`, with a chat about two sounds."""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken

from penstock.api.request import Image
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.sound_input import read_sound_input
from penstock.frontend.audio.windows import windows_of
from tests.support.hearing import a_sound
from tests.support.tokenizers_for_tests import byte_level_bpe

TEXT = 300
"""Number of text tokens; the special ones follow."""
PLACEHOLDER, BEGIN, END_OF_SOUND, END = range(TEXT, TEXT + 4)
MELS, POSITIONS = 16, 100
SECONDS = POSITIONS / 50
"""Of a window."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}<|begin|><|sound|><|end of sound|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": TEXT + 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
_ENCODER = {
    "num_mel_bins": MELS,
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
}

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Family:
    """A kind of model: its configuration, and how `transformers` takes sounds."""

    config: dict[str, Any]
    architecture: str
    inputs: Callable[[Any, list[Samples]], dict[str, Any]]
    """From a feature extractor and sounds to the model's arguments."""
    lengths: tuple[float, ...]
    """Seconds of the two sounds."""
    longest: int = int(SECONDS)
    """Seconds that the feature extractor fills up to."""
    mrope: bool = False
    joined: bool = False


def _masked(extractor: Any, sounds: list[Samples]) -> dict[str, Any]:
    made = extractor(
        sounds, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    return {"input_features": made.input_features, "feature_attention_mask": made.attention_mask}


def _bare(extractor: Any, sounds: list[Samples]) -> dict[str, Any]:
    """Without silence, but for that beside a longer sound, which is masked."""
    made = [
        extractor(one, sampling_rate=16_000, padding=True, truncation=False, return_attention_mask=True)
        for one in sounds
    ]
    most = max(one.input_features.shape[-1] for one in made)
    features, masks = np.zeros((len(made), MELS, most), np.float32), np.zeros((len(made), most), np.int64)
    for index, one in enumerate(made):
        count = one.input_features.shape[-1]
        features[index, :, :count], masks[index, :count] = one.input_features[0], 1
    return {"input_features": torch.from_numpy(features), "feature_attention_mask": torch.from_numpy(masks)}


def _apart(extractor: Any, sounds: list[Samples]) -> dict[str, Any]:
    """As `AudioFlamingo3Processor`."""
    step = int(SECONDS * 16_000)
    windows = [sound[first : first + step] for sound in sounds for first in range(0, len(sound), step)]
    made = _masked(extractor, windows)
    return {"input_features": made["input_features"], "input_features_mask": made["feature_attention_mask"]}


def _in_windows(extractor: Any, sounds: list[Samples]) -> dict[str, Any]:
    """As `VoxtralProcessor`."""
    found = []
    for sound in sounds:
        multiple = int(SECONDS * 16_000)
        made = extractor(
            sound,
            sampling_rate=16_000,
            truncation=False,
            padding=True,
            pad_to_multiple_of=multiple,
            return_tensors="pt",
        )
        found.append(made.input_features.reshape(MELS, -1, 2 * POSITIONS).transpose(0, 1))
    return {"input_features": torch.cat(found)}


FAMILIES: dict[str, Family] = {
    "Qwen2-Audio": Family(
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "audio_config": _ENCODER | {"model_type": "qwen2_audio_encoder", "max_source_positions": POSITIONS},
            "audio_token_index": PLACEHOLDER,
        },
        "Qwen2AudioForConditionalGeneration",
        _masked,
        (1.3, 1.9957),
    ),
    "Audio Flamingo 3": Family(
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "num_mel_bins": MELS,
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "max_source_positions": POSITIONS,
            },
            "audio_token_id": PLACEHOLDER,
        },
        "AudioFlamingo3ForConditionalGeneration",
        _apart,
        (1.3, 2.7),
    ),
    "Voxtral": Family(
        {
            "text_config": _TEXT | {"model_type": "llama", "head_dim": 16},
            "audio_config": {
                "model_type": "voxtral_encoder",
                "num_mel_bins": MELS,
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "max_source_positions": POSITIONS,
            },
            "audio_token_id": PLACEHOLDER,
        },
        "VoxtralForConditionalGeneration",
        _in_windows,
        (1.3, 2.7),
    ),
    "Qwen2.5-Omni": Family(
        {
            "text_config": _TEXT
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}},
            "audio_config": _ENCODER | {"n_window": 10, "output_dim": 64, "max_source_positions": POSITIONS},
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 32,
                "out_hidden_size": 64,
                "patch_size": 4,
            },
            "audio_token_index": PLACEHOLDER,
            "image_token_index": 7,
            "video_token_index": 8,
            "vision_start_token_id": 6,
            "audio_start_token_id": BEGIN,
            "audio_end_token_id": END_OF_SOUND,
        },
        "Qwen2_5OmniThinkerForConditionalGeneration",
        _masked,
        (1.3, 2.507),
        longest=4,
    ),
}


FAMILIES["Qwen3-Omni"] = Family(
    FAMILIES["Qwen2.5-Omni"].config
    | {
        "text_config": _TEXT
        | {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]},
        },
        "audio_config": _ENCODER
        | {
            "n_window": 50,
            "n_window_infer": 200,
            "output_dim": 64,
            "downsample_hidden_size": 12,
            "max_source_positions": POSITIONS,
        },
        "vision_config": FAMILIES["Qwen2.5-Omni"].config["vision_config"] | {"deepstack_visual_indexes": []},
        "audio_token_id": PLACEHOLDER,
        "image_token_id": 7,
        "video_token_id": 8,
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    _bare,
    (1.3, 2.507),
)


class Reference:
    """Answers of `transformers`' model of a checkpoint to a prompt with media."""

    model: Any
    tokens: list[int]

    def arguments(self, tokens: list[int]) -> dict[str, Any]:
        """The model's arguments for these tokens, which have all media."""
        raise NotImplementedError

    def logits(self) -> torch.Tensor:
        """The reference's logits of all tokens."""
        with torch.no_grad():
            return self.model(**self.arguments(self.tokens)).logits[0].float()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The reference's greedy tokens after a prompt with all media."""
        torch.set_num_threads(1)  # tests run side by side
        with torch.no_grad():
            made = self.model.generate(
                **self.arguments(tokens), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return made[0, len(tokens) :].tolist()


@dataclass(frozen=True)
class Heard(Reference):
    """A checkpoint in a folder, its model of `transformers`, and a prompt with two sounds."""

    family: Family
    folder: Path
    model: Any
    sounds: list[Samples]
    tokens: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    def arguments(self, tokens: list[int]) -> dict[str, Any]:
        """The reference's arguments for these tokens, which have all sounds."""
        extractor = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=self.family.longest)
        ids = torch.tensor([tokens])
        given = self.family.inputs(extractor, self.sounds)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}


def make(name: str, folder: Path) -> Heard:
    """Write a random checkpoint of a family to `folder`."""
    family = FAMILIES[name]
    torch.manual_seed(4)
    maker = getattr(transformers, family.architecture)
    model = maker(maker.config_class(**family.config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"chunk_length": family.longest}))
    tokenizer = byte_level_bpe(TEXT)
    names = ("<|sound|>", "<|begin|>", "<|end of sound|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    heard = Heard(family, folder, model, [a_sound(seconds, seed) for seed, seconds in enumerate(family.lengths)])
    heard.tokens.extend([5, 9, 11])
    for sound in heard.sounds:
        heard.tokens.append(BEGIN)
        for image in images_of(sound, folder, len(heard.tokens)):
            heard.images.append(image)
            heard.tokens.extend([PLACEHOLDER] * image.count)
        heard.tokens.extend([END_OF_SOUND, 7, 8])
    heard.tokens.extend([12, 13, 14])
    return heard


def images_of(sound: Samples, folder: Path, start: int) -> list[Image]:
    """The windows of a sound whose tokens begin at `start`."""
    about = read_sound_input(open_checkpoint(str(folder)))
    assert about is not None
    windows, made = windows_of(sound, about), []
    for (height, width), features in zip(windows.sizes, windows.features, strict=True):
        count = about.num_tokens(width)
        digest = hashlib.sha256(struct.pack("<II", height, width) + features).digest()
        made.append(Image(start, count, 1, count, height, width, digest, features, is_sound=True))
        start += count
    assert windows.digests == [image.digest.hex() for image in made]
    return made
