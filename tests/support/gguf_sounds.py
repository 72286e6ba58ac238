"""GGUF files of models that hear, with their mmproj files, as llama.cpp's converters write them, for tests."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map
from torch import Tensor

from tests.support import omni, sounds
from tests.support.gguf_families import Kind, add_nothing
from tests.support.gguf_files import add_byte_level, encode, finish
from tests.support.gguf_tensors import interleaved
from tests.support.gguf_vision import add_sections, add_tower, stored_name, write_text

_PLACES = 1500
"""Sinusoids that the converter writes of an encoder without learned positions."""
_QWEN: Kind = ("qwen2", add_nothing, None)


@dataclass(frozen=True)
class Written:
    """What the converter writes of one architecture."""

    projectors: dict[str, str]
    """By their keys in the file."""
    names: dict[int, str]
    """Texts of tokens."""
    kind: Kind


_OMNI = {omni.BEGIN_SOUND: "<|audio_bos|>", omni.END_SOUND: "<|audio_eos|>"}
KINDS = {
    "Qwen2AudioForConditionalGeneration": Written(
        {"clip.projector_type": "qwen2a"},
        {sounds.PLACEHOLDER: "<|AUDIO|>", sounds.BEGIN: "<|audio_bos|>", sounds.END_OF_SOUND: "<|audio_eos|>"},
        _QWEN,
    ),
    "AudioFlamingo3ForConditionalGeneration": Written(
        {"clip.projector_type": "musicflamingo"}, {sounds.PLACEHOLDER: "<sound>"}, _QWEN
    ),
    "VoxtralForConditionalGeneration": Written(
        {"clip.projector_type": "voxtral"}, {sounds.PLACEHOLDER: "[AUDIO]"}, ("llama", add_nothing, interleaved)
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": Written(
        {"clip.projector_type": "qwen2.5o"},
        {**_OMNI, omni.SOUND: "<|AUDIO|>", omni.PICTURE: "<|IMAGE|>"},
        ("qwen2vl", add_sections, None),
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Written(
        {"clip.vision.projector_type": "qwen3vl_merger", "clip.audio.projector_type": "qwen3a"},
        {**_OMNI, omni.SOUND: "<|audio_pad|>", omni.PICTURE: "<|image_pad|>"},
        ("qwen3vlmoe", add_sections, None),
    ),
}
"""By the architecture of the whole model."""


def write_with_sounds(
    folder: Path,
    path: Path,
    mmproj: str = "mmproj-F32.gguf",
    *,
    stored: str = "F32",
    extra: Mapping[str, Tensor] = {},
    template: str | None = None,
) -> None:
    """Write the text model of the checkpoint in `folder` to `path`, and its encoders beside it as `mmproj`.

    Args:
        stored: the type of the audio encoder's tensors with several axes, but for its positions.
        extra: more tensors, or others.
        template: the chat template, with the folder's names of tokens; the folder's tokenizer is then written, too.
    """
    config = json.loads((folder / "config.json").read_text())
    written = KINDS[config["architectures"][0]]
    tokenizer = {} if template is None else _tokenizer(folder, written.names, template)
    others = write_text(folder, path, written.kind, written.names, tokenizer)
    write_mmproj(path.parent / mmproj, folder, others, stored=stored, extra=extra)


def _tokenizer(folder: Path, names: Mapping[int, str], template: str) -> dict[str, Any]:
    """Metadata of the folder's tokenizer with other texts of some tokens, in the chat template, too."""
    writer = GGUFWriter(None, "llama", use_temp_file=False)
    add_byte_level(writer, folder)
    found = {key: item.value for key, item in writer.kv_data[0].items() if key.startswith("tokenizer.")}
    texts = found["tokenizer.ggml.tokens"] = list(found["tokenizer.ggml.tokens"])
    for token, name in names.items():
        template = template.replace(texts[token], name)
        texts[token] = name
    return found | {"tokenizer.chat_template": template}


def write_mmproj(
    path: Path, folder: Path, tensors: Mapping[str, Tensor], *, stored: str = "F32", extra: Mapping[str, Tensor] = {}
) -> None:
    """Write the encoders of the checkpoint in `folder`, whose tensors these are. See `write_with_sounds`."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(None, "clip", use_temp_file=False)
    writer.add_type("mmproj")
    projectors = KINDS[config["architectures"][0]].projectors
    for key, projector in projectors.items():
        writer.add_string(key, projector)
    if "vision_config" in config:
        merger = projectors.get("clip.vision.projector_type", "qwen2.5vl_merger")
        renamed = _like_qwen3_vl if merger == "qwen3vl_merger" else str
        vision = {renamed(name): one for name, one in tensors.items() if name.startswith("visual.")}
        add_tower(writer, folder, merger, vision)
    _add_audio(writer, config)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)
    heard = {name: one for name, one in tensors.items() if not name.startswith("visual.")}
    rng = np.random.default_rng(0)
    converted = {stored_name(name, names): one for name, one in _converted(heard, config)}
    for name, one in {**converted, **extra}.items():
        kind = GGMLQuantizationType[stored if one.dim() > 1 and "position" not in name else "F32"]
        writer.add_tensor(name, encode(one.contiguous().numpy(), kind, rng), raw_dtype=kind)
    finish(writer, path)


def _like_qwen3_vl(name: str) -> str:
    """Qwen3-Omni's name of a tensor of its vision tower as Qwen3-VL's."""
    for old, new in (("merger_list", "deepstack_merger_list"), ("ln_q", "norm"), ("mlp.0", "linear_fc1")):
        name = name.replace(f".{old}.", f".{new}.")
    return name.replace(".mlp.2.", ".linear_fc2.")


def _add_audio(writer: GGUFWriter, config: Any) -> None:
    audio = config["audio_config"]
    writer.add_clip_has_audio_encoder(True)
    writer.add_audio_projection_dim(config["text_config"]["hidden_size"])
    writer.add_audio_embedding_length(audio.get("d_model", audio.get("hidden_size")))
    writer.add_audio_feed_forward_length(audio.get("encoder_ffn_dim", audio.get("intermediate_size")))
    writer.add_audio_block_count(audio.get("encoder_layers", audio.get("num_hidden_layers")))
    writer.add_audio_head_count(audio.get("encoder_attention_heads", audio.get("num_attention_heads")))
    writer.add_audio_num_mel_bins(audio["num_mel_bins"])
    writer.add_audio_attention_layernorm_eps(1e-5)
    if config["model_type"] == "voxtral":
        writer.add_audio_stack_factor(4)


def _converted(tensors: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """The audio encoder's tensors as the converter changes them, under the names in the tables of `gguf`."""
    for name, tensor in tensors.items():
        if "audio_bos_eos_token" in name:
            continue
        if name.endswith(("conv1.bias", "conv2.bias")):
            tensor = tensor.unsqueeze(-1)
        if "conv2d" in name and name.endswith(".bias"):
            tensor = tensor[:, None, None]
        yield f"audio.{name}" if name.startswith("multi_modal_projector") else name, tensor
    if "vision_config" in config:
        yield "audio_tower.embed_positions.weight", _sinusoids(config["audio_config"]["d_model"])


def _sinusoids(size: int) -> Tensor:
    rates = torch.exp(-np.log(10000) / (size // 2 - 1) * torch.arange(size // 2).float())
    angles = torch.arange(_PLACES)[:, None] * rates
    return torch.cat([torch.sin(angles), torch.cos(angles)], 1)
