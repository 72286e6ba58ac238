"""GGUF files of models that see, with their mmproj files, as llama.cpp's converters write them, for tests."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.gguf_families import FAMILIES, Kind, add_nothing, write_family
from tests.support.gguf_files import finish, interleave
from tests.support.gguf_tensors import interleaved, norms_plus_one
from tests.support.vision import PLACEHOLDER

_TEXT = ("language_model.", "text_model.", "lm_head.", "embed_tokens.", "layers.", "norm.")
_SKIPPED = ("vision_tower.vision_model.head.", "vision_tower.head.")
_SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
_LLAMA: Kind = ("llama", add_nothing, interleaved)


def add_sections(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def _add_qwen3_5(writer: GGUFWriter, config: Any) -> None:
    FAMILIES["Qwen3_5ForCausalLM"][1](writer, config)
    add_sections(writer, config)


def _add_gemma3(writer: GGUFWriter, config: Any) -> None:
    FAMILIES["Gemma3ForCausalLM"][1](writer, config)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 1 + config["layer_types"].index("full_attention"))


KINDS: dict[str, tuple[str, str, Kind]] = {
    "Qwen2VLForConditionalGeneration": ("qwen2vl_merger", "<|image_pad|>", ("qwen2vl", add_sections, None)),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2.5vl_merger", "<|image_pad|>", ("qwen2vl", add_sections, None)),
    "Qwen3VLForConditionalGeneration": ("qwen3vl_merger", "<|image_pad|>", ("qwen3vl", add_sections, None)),
    "Qwen3_5ForConditionalGeneration": (
        "qwen3vl_merger",
        "<|image_pad|>",
        ("qwen35", _add_qwen3_5, FAMILIES["Qwen3_5ForCausalLM"][2]),
    ),
    "Gemma3ForConditionalGeneration": ("gemma3", "<image_soft_token>", ("gemma3", _add_gemma3, norms_plus_one)),
    "Gemma4ForConditionalGeneration": ("gemma4v", "<|image|>", FAMILIES["Gemma4ForCausalLM"]),
    "Llama4ForConditionalGeneration": ("llama4", "<|patch|>", FAMILIES["Llama4ForCausalLM"]),
    "Idefics3ForConditionalGeneration": ("idefics3", "<image>", _LLAMA),
    "LlavaForConditionalGeneration": ("pixtral", "[IMG]", _LLAMA),
    "Mistral3ForConditionalGeneration": ("pixtral", "[IMG]", _LLAMA),
    "Lfm2VlForConditionalGeneration": ("lfm2", "<image>", FAMILIES["Lfm2ForCausalLM"]),
    "InternVLForConditionalGeneration": ("internvl", "<IMG_CONTEXT>", ("qwen3", add_nothing, None)),
}
"""The projector, the token of a feature, and the text model's kind, by the architecture of both."""


def write_with_vision(
    folder: Path,
    path: Path,
    mmproj: str = "mmproj-F32.gguf",
    extra: Mapping[str, Tensor] = {},
    audio: str | None = None,
) -> None:
    """Write the text model of the checkpoint in `folder` to `path`, and its tower beside it as `mmproj`.

    Args:
        extra: more tensors of the tower.
        audio: the type of the projector of an audio encoder in the file.
    """
    config = json.loads((folder / "config.json").read_text())
    projector, token, kind = KINDS[config["architectures"][0]]
    around = ["<|image>", "<image|>"] if projector == "gemma4v" else ["<start_of_image>", "<end_of_image>"]
    others = write_text(folder, path, kind, {PLACEHOLDER: token, 152: around[0], 153: around[1]})
    tower = {name: one for name, one in others.items() if not name.startswith(_SKIPPED)}
    writer = GGUFWriter(None, "clip", use_temp_file=False)
    writer.add_type("mmproj")
    if projector == "gemma4v":  # a file may have an audio tower of another type
        writer.add_clip_vision_projector_type(projector)
    else:
        writer.add_clip_projector_type(projector)
    if audio is not None:
        writer.add_clip_audio_projector_type(audio)
    add_tower(writer, folder, projector, {**tower, **extra})
    finish(writer, path.parent / mmproj)


def write_text(
    folder: Path, path: Path, kind: Kind, names: Mapping[int, str], tokenizer: Mapping[str, Any] = {}
) -> dict[str, Tensor]:
    """Write the text model of the checkpoint in `folder` to `path`; returns the other tensors.

    Args:
        names: texts of some tokens.
        tokenizer: metadata of the tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {name.removeprefix("model."): one for name, one in load_file(folder / "model.safetensors").items()}
    text = path.parent / "text"
    text.mkdir()
    (text / "config.json").write_text(json.dumps({**config["text_config"], "architectures": ["of both"]}))
    save_file(
        {_of_text(name): one for name, one in tensors.items() if name.startswith(_TEXT)}, text / "model.safetensors"
    )
    tokens = [names.get(index, f"[{index}]") for index in range(config["text_config"]["vocab_size"])]
    padding = config["text_config"].get("pad_token_id")
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.padding_token_id": padding, **tokenizer}
    write_family(path, text, metadata=metadata, kind=kind)
    return {name: one for name, one in tensors.items() if not name.startswith(_TEXT)}


def _of_text(name: str) -> str:
    if name.startswith(("lm_head.", "language_model.lm_head.")):
        return name.removeprefix("language_model.")
    return "model." + name.removeprefix("language_model.").removeprefix("text_model.").removeprefix("model.")


def add_tower(writer: GGUFWriter, folder: Path, projector: str, tensors: Mapping[str, Tensor]) -> None:
    """Add the vision tower of the checkpoint in `folder`: its keys and tensors, but for the type of its projector."""
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(_side(vision["patch_size"]))
    writer.add_vision_image_size(_side(vision.get("image_size", 560)))
    writer.add_vision_embedding_length(vision.get("embed_dim", vision["hidden_size"]))
    # the converter writes the text model's hidden size for Qwen2-VL
    writer.add_vision_feed_forward_length(vision.get("intermediate_size", vision["hidden_size"]))
    writer.add_vision_block_count(vision.get("depth", vision.get("num_hidden_layers")))
    writer.add_vision_head_count(vision.get("num_heads", vision.get("num_attention_heads")))
    eps = 1e-5 if projector in ("pixtral", "llama4") else vision.get("layer_norm_eps", 1e-6)
    writer.add_vision_attention_layernorm_eps(eps)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    _add_settings(writer, projector, config, vision)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)
    for name, tensor in tensors.items():
        plain = name.replace("vision_tower.vision_model.", "vision_tower.")
        for new, one in _converted(plain, tensor, projector, vision):
            writer.add_tensor(
                new if new.startswith(("v.", "mm.", "a.")) else stored_name(new, names), one.contiguous().numpy()
            )


def _side(given: Any) -> int:
    return int(given[0] if isinstance(given, list) else given)


def _add_settings(writer: GGUFWriter, projector: str, config: Any, vision: Any) -> None:
    if projector.startswith("qwen"):
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    if projector == "qwen2.5vl_merger":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", vision["window_size"])
    if projector == "qwen3vl_merger":
        tapped = vision.get("deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([index in tapped for index in range(vision["depth"])])
    if projector == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        writer.add_vision_projector_scale_factor(side // math.isqrt(config["mm_tokens_per_image"]))
    if projector == "gemma4v":
        writer.add_vision_projector_scale_factor(vision["pooling_kernel_size"])
    if projector == "idefics3":
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_preproc_image_size(64)
    if projector == "pixtral":
        (writer.add_vision_use_silu if vision["hidden_act"] == "silu" else writer.add_vision_use_gelu)(True)
        if "spatial_merge_size" in config:
            writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    if projector == "lfm2":
        writer.add_vision_projector_scale_factor(config["downsample_factor"])
    if projector in ("internvl", "llama4"):
        ratio = config["downsample_ratio"] if projector == "internvl" else vision["pixel_shuffle_ratio"]
        writer.add_vision_projector_scale_factor(int(1 / ratio))
    if projector in ("gemma3", "idefics3", "lfm2", "internvl", "qwen3vl_merger"):
        writer.add_vision_use_gelu(True)


_INTERN = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
_MERGER = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
_TAPS = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}


def _converted(name: str, tensor: Tensor, projector: str, vision: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor as the converter writes it: names of the file, or those that the tables of `gguf` have."""
    stem, _, leaf = name.rpartition(".")
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif projector != "qwen3vl_merger" and ".qkv." in name:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), rows
    elif stem.startswith("visual.merger.") and projector == "qwen3vl_merger":
        yield f"{_MERGER[stem.removeprefix('visual.merger.')]}.{leaf}", tensor
    elif stem.startswith("visual.deepstack"):
        _, _, index, part = stem.split(".")
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(index)]}.{_TAPS[part]}.{leaf}", tensor
    elif projector == "pixtral" and (".q_proj" in name or ".k_proj" in name):
        yield name, torch.from_numpy(interleave(tensor.numpy(), vision["num_attention_heads"]))
    elif projector == "lfm2" and name.endswith("patch_embedding.weight"):
        size = vision["patch_size"]
        yield name, tensor.view(len(tensor), size, size, 3).permute(0, 3, 1, 2)
    elif projector == "internvl":
        short = stem.removeprefix("multi_modal_projector.")
        full = name if short == stem else f"{_INTERN[short]}.{leaf}"
        yield full + (".weight" if leaf.startswith(("lambda_", "position_")) else ""), tensor
    elif projector == "gemma4v":
        tensor = tensor.reshape(1) if not tensor.dim() else tensor
        name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        if name.endswith("input_proj.weight"):
            size = vision["patch_size"]
            tensor = tensor.reshape(len(tensor), size, size, 3).permute(0, 3, 1, 2)
        yield name + (".weight" if name.endswith("position_embedding_table") else ""), tensor
    elif projector == "llama4":
        full = "mm.model.fc.weight" if stem == "multi_modal_projector.linear_1" else name
        yield full + (".weight" if leaf == "positional_embedding_vlm" else ""), tensor
    elif projector == "gemma3":
        yield name.replace("_weight", ".weight"), tensor + 1 if "soft_emb_norm" in name else tensor
    else:
        yield name, tensor


def stored_name(name: str, names: TensorNameMap) -> str:
    """The file's name of a tensor, by the tables of `gguf`."""
    for known in (name, f"model.{name}", name.replace("vision_tower.", "vision_tower.vision_model.")):
        if (found := names.get_name(known, try_suffixes=_SUFFIXES)) is not None:
            return found
    raise AssertionError(name)
