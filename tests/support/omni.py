"""Tiny thinkers of Qwen-Omni, made by `transformers`, with a prompt of images and sounds in turns."""

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as PillowImage
from tokenizers import AddedToken

from penstock.api.request import Image
from tests.support import sounds
from tests.support.hearing import a_sound
from tests.support.tokenizers_for_tests import byte_level_bpe
from tests.support.vision import Pixels, as_patches, image_of

TEXT = sounds.TEXT
SOUND, BEGIN_SOUND, END_SOUND, PICTURE, BEGIN_PICTURE, END_PICTURE, VIDEO, END = range(TEXT, TEXT + 8)
NAMES = ("sound", "begin sound", "end sound", "picture", "begin picture", "end picture", "video", "end")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}<|begin sound|><|sound|><|end sound|>"
    "{% elif p.type == 'image' %}<|begin picture|><|picture|><|end picture|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
SIDE = 4
"""Pixels of a patch; four patches are merged."""
_TOWER = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
_TOWERS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Omni": {"window_size": 16, "fullatt_block_indexes": [1]},
    "Qwen3-Omni": {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
}
_TOKENS = {
    "audio_start_token_id": BEGIN_SOUND,
    "audio_end_token_id": END_SOUND,
    "vision_start_token_id": BEGIN_PICTURE,
    "vision_end_token_id": END_PICTURE,
}
SIZES, SECONDS = ((24, 32), (16, 16)), (1.3, 2.507)


@dataclass(frozen=True)
class Omni(sounds.Reference):
    """A checkpoint in a folder, its model of `transformers`, and a prompt with pictures and sounds."""

    family: sounds.Family
    folder: Path
    model: Any
    media: list[Pixels | sounds.Samples]
    """In the order of the prompt: pictures have three axes."""
    tokens: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    def arguments(self, tokens: list[int]) -> dict[str, Any]:
        """The reference's arguments for these tokens, which have all media."""
        ids = torch.tensor([tokens])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        pictures = [torch.from_numpy(one).permute(2, 0, 1) for one in self.media if one.ndim == 3]
        if pictures:
            given |= as_patches([((one * (1 / 255) - 0.5) / 0.5).float() for one in pictures], SIDE, 2)
        heard = [one for one in self.media if one.ndim == 1]
        if heard:
            extractor = transformers.WhisperFeatureExtractor(feature_size=sounds.MELS, chunk_length=self.family.longest)
            given |= self.family.inputs(extractor, heard)
        return given


def make(name: str, folder: Path, order: str = "isi") -> Omni:
    """Write a random checkpoint to `folder`; `order`: of its images and sounds."""
    heard = sounds.FAMILIES[name]
    ids = {"audio": SOUND, "image": PICTURE, "video": VIDEO}
    key = "token_index" if name == "Qwen2.5-Omni" else "token_id"
    config = heard.config | _TOKENS | {f"{kind}_{key}": token for kind, token in ids.items()}
    config["vision_config"] = {**_TOWER, "patch_size": SIDE, **_TOWERS[name]}
    config["text_config"] = heard.config["text_config"] | {"vocab_size": TEXT + len(NAMES), "eos_token_id": END}
    family = replace(heard, config=config, mrope=True)
    torch.manual_seed(4)
    maker = getattr(transformers, family.architecture)
    model = maker(maker.config_class(**config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    _write_texts(folder, family.longest)
    rng = np.random.default_rng(7)
    pictures = iter([rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in SIZES])
    waves = iter([a_sound(seconds, seed) for seed, seconds in enumerate(SECONDS)])
    made = Omni(family, folder, model, [next(pictures) if kind == "i" else next(waves) for kind in order])
    made.tokens.extend([5, 9, 11])
    for one in made.media:
        _add(made, one)
    made.tokens.extend(range(12, 24))  # more than a block: the prefix cache has all media
    return made


def _write_texts(folder: Path, longest: int) -> None:
    """Write the processor's settings, the tokenizer and the chat template."""
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": SIDE, "merge_size": 2}
    processor |= {"min_pixels": 64, "max_pixels": 4096, "chunk_length": longest}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer = byte_level_bpe(TEXT)
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _add(made: Omni, one: Any) -> None:
    """Add a picture or a sound to the prompt."""
    is_picture = one.ndim == 3
    made.tokens.append(BEGIN_PICTURE if is_picture else BEGIN_SOUND)
    start = len(made.tokens)
    if is_picture:
        found = [image_of(one, start, *(side // SIDE // 2 for side in one.shape[:2]))]
    else:
        found = sounds.images_of(one, made.folder, start)
    for image in found:
        made.images.append(image)
        made.tokens.extend([PICTURE if is_picture else SOUND] * image.count)
    made.tokens.extend([END_PICTURE if is_picture else END_SOUND, 7, 8])


def png_of(pixels: Pixels) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
