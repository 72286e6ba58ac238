"""GGUF files for tests, written by the package `gguf` from Hugging Face folders, as llama.cpp's converter does."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  lets safetensors read bfloat16
import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, RopeScalingType, TokenType
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "GraniteForCausalLM": "granite",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "MixtralForCausalLM": "llama",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
}
_PERMUTED = ("llama", "granite", "smollm3")
_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
    "NVFP4": (),
}
"""Where the float16 scales of a block are, of types that `gguf` reads and does not write."""

_WRITTEN = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"}

TypeOf = Callable[[str], str]
"""The type that the tensor of a GGUF name is stored in."""


def write_gguf(
    path: Path,
    folder: Path,
    stored: str | TypeOf = "F32",
    *,
    vectors: str = "F32",
    split_after: int = 0,
    extra: Mapping[str, tuple[str, int | NDArray[np.float32]]] = {},
    **metadata: Any,
) -> dict[str, NDArray[np.float32]]:
    """Write the checkpoint in `folder` as a GGUF file; returns what its tensors are then, by the folder's names.

    Args:
        stored: the type of matrices.
        vectors: the type of vectors.
        split_after: tensors a file, of several.
        extra: more tensors, by name: type, and size or values.
        metadata: more of it, or other values; None leaves a key out. Dots are written as two underscores.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(None, architecture, split_max_tensors=split_after, use_temp_file=False)
    _add_config(writer, architecture, config)
    if (folder / "tokenizer.json").exists():
        add_byte_level(writer, folder)
    for key, value in metadata.items():
        _set(writer, key.replace("__", "."), value)
    types = stored if callable(stored) else lambda _: stored
    values = _add_tensors(writer, architecture, config, folder, types, vectors)
    for name, (kind, size) in extra.items():
        data = np.ones(size, np.float32) if isinstance(size, int) else size
        writer.add_tensor(name, quants.quantize(data, GGMLQuantizationType[kind]), raw_dtype=GGMLQuantizationType[kind])
    finish(writer, path)
    return values


def finish(writer: GGUFWriter, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _set(writer: GGUFWriter, key: str, value: Any) -> None:
    for data in writer.kv_data:
        data.pop(key, None)
    if value is None:
        return
    integer = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: integer,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kinds.get(type(value), writer.add_array)(key, value)


def _add_config(writer: GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR if kind == "linear" else RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and architecture == "llama":
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def add_byte_level(writer: GGUFWriter, folder: Path, pre: str = "gpt-2", least: int = 0) -> None:
    """The byte-level tokenizer of a folder, with its chat template, filled up with unused tokens to `least`."""
    state = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    size = max(least, Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())
    texts, types = [f"[PAD{token}]" for token in range(size)], [TokenType.UNUSED] * size
    for text, token in state["model"]["vocab"].items():
        texts[token], types[token] = text, TokenType.NORMAL
    for added in state["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        texts[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    merges = state["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(name) in texts:
            add(texts.index(settings[name]))
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _add_tensors(
    writer: GGUFWriter, architecture: str, config: Mapping[str, Any], folder: Path, stored: TypeOf, vectors: str
) -> dict[str, NDArray[np.float32]]:
    names = get_tensor_name_map(
        {name: key for key, name in MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"] + 1
    )
    values = {}
    rng = np.random.default_rng(0)
    for name, tensor in _stacked(load_file(folder / "model.safetensors")).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        array = tensor.astype(np.float32)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        permuted = architecture in _PERMUTED and heads is not None
        count = config[heads] if heads else 1
        kind = GGMLQuantizationType[stored(gguf_name) if array.ndim > 1 else vectors]
        data = encode(interleave(array, count) if permuted else array, kind, rng)
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
        decoded = decode(data, kind)
        values[name] = deinterleave(decoded, count) if permuted else decoded
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    return values


def _stacked(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """With the experts of a layer in one tensor."""
    experts: dict[str, dict[int, NDArray[Any]]] = {}
    others = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if match is None:
            others[name] = tensor
        else:
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
    return others | {name: np.stack([parts[expert] for expert in sorted(parts)]) for name, parts in experts.items()}


def interleave(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of queries or keys in the order of interleaved rotary pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def encode(values: NDArray[np.float32], kind: GGMLQuantizationType, rng: np.random.Generator) -> NDArray[Any]:
    """As a file holds them; of a type that `gguf` does not write, random blocks with small scales instead."""
    columns, size = GGML_QUANT_SIZES[kind]
    if kind.name in _WRITTEN:
        return quants.quantize(np.ascontiguousarray(values), kind)
    blocks = rng.integers(0, 256, (values.size // columns, size), dtype=np.uint8)
    if kind.name == "NVFP4":
        blocks[:, :4] = rng.integers(8, 24, (len(blocks), 4))
    for place in _SCALES.get(kind.name, ()):
        scales = (rng.random(len(blocks)) * 1e-3).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1)


def decode(data: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    if kind.name not in _WRITTEN and kind.name not in _SCALES:
        return np.zeros(0, np.float32)
    return quants.dequantize(data, kind).astype(np.float32)


def llama3_factors(config: Mapping[str, Any]) -> NDArray[np.float32]:
    """What the converter writes for Llama 3's rope: each frequency's divisor."""
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = old * frequencies / (2 * np.pi)
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(turns > high, 1.0, np.where(turns < low, factor, between)).astype(np.float32)
