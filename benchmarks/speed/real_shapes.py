"""Write a random checkpoint in a real model's shape, as a GGUF file or a Hugging Face folder, to compare with peers.

    python -m benchmarks.speed.real_shapes SHAPE FOLDER [--form q4_k_m|q4_0|hf] [--layers N]

Only speed is compared on these. A GGUF file has random blocks of the types that llama.cpp's quantizer takes for each
tensor, and is written without the model: a mixture of 30 billion parameters costs the file's size. `--form hf` lets
`transformers` write bfloat16 weights. Files are FOLDER/model-<form>.gguf and FOLDER/model.safetensors, as
`../shared/peers/compare.py` and `benchmarks/speed/peers.py` expect them.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray

from tests.support.checkpoints import write_random, write_tokenizer
from tests.support.gguf_families import FAMILIES, add_common, add_nothing
from tests.support.gguf_files import add_byte_level, finish
from tests.support.gguf_tensors import converted

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3.5-0.8b": (
        "Qwen3_5",
        {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    "gemma3-1b": (
        "Gemma3",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
}
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are not whole blocks of 256."""

SCALES: dict[str, dict[int, float]] = {
    "Q4_K": {0: 1.2e-4, 2: 9e-4},
    "Q5_K": {0: 6e-5, 2: 9e-4},
    "Q6_K": {208: 2.4e-5},
    "Q4_0": {0: 6e-3},
    "Q5_0": {0: 3e-3},
    "Q5_1": {0: 3e-3, 2: -0.047},
    "Q8_0": {0: 4e-4},
}
"""Where the float16 scales of a block are, and such values that weights are some hundredths, around zero."""


def type_of(name: str, form: str, layer: int, layers: int, *, tied: bool) -> str:
    """What llama.cpp's quantizer stores a matrix in."""
    if name.startswith("output.") or (tied and name.startswith("token_embd.")):
        return "Q6_K"
    if form == "q4_0":
        return "Q4_0"
    if "attn_qkv" in name:
        return "Q5_K"
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if more and ("attn_v." in name or "ffn_down" in name) else "Q4_K"


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, rng: np.random.Generator) -> NDArray[np.uint8]:
    columns, size = GGML_QUANT_SIZES[kind]
    blocks: NDArray[np.uint8] = (
        np.frombuffer(rng.bytes(int(np.prod(shape)) // columns * size), np.uint8).reshape(-1, size).copy()
    )
    for place, scale in SCALES[kind.name].items():
        blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def tensors_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's small tensors with values, its matrices without, the experts of a layer by the names of their files."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if tensor.numel() < 2**17 and "proj" not in name:
            tensor = torch.randn(tensor.shape) * 0.1 + ("norm" in name)
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            yield name + (".weight" if name.endswith("experts.down_proj") else ""), tensor


def write_gguf(path: Path, family: str, shape: dict[str, Any], form: str) -> None:
    kind = getattr(transformers, f"{family}ForCausalLM")
    with torch.device("meta"):
        model = kind(kind.config_class(**shape))
    config = model.config.to_dict()
    layers = config["num_hidden_layers"]
    architecture, add_config, convert = FAMILIES.get(f"{family}ForCausalLM", ("qwen3moe", add_nothing, None))
    writer = GGUFWriter(None, architecture, use_temp_file=False)
    add_common(writer, config)
    add_config(writer, config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), 384)
        add_byte_level(writer, Path(folder), "qwen2", config["vocab_size"])
    (key,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(key, layers)
    rng = np.random.default_rng(0)
    for name, tensor in converted(tensors_of(model), config, convert):
        gguf_name = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if tensor.device.type == "cpu":
            writer.add_tensor(gguf_name, tensor.float().numpy())
            continue
        layer = re.match(r"blk\.(\d+)\.", gguf_name)
        stored = type_of(gguf_name, form, int(layer[1]) if layer else 0, layers, tied=config["tie_word_embeddings"])
        if tensor.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[stored]][0]:
            stored = FALLBACKS[stored]
        data = random_blocks(tuple(tensor.shape), GGMLQuantizationType[stored], rng)
        writer.add_tensor(gguf_name, data, raw_dtype=GGMLQuantizationType[stored])
    finish(writer, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=["q4_k_m", "q4_0", "hf"], default="q4_k_m")
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    family, shape = SHAPES[arguments.shape]
    shape = shape | {"bos_token_id": None, "eos_token_id": 0}
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.form == "hf":
        write_random(arguments.folder, family, dtype="bfloat16", **shape)
        write_tokenizer(arguments.folder, 384)
    else:
        write_gguf(arguments.folder / f"model-{arguments.form}.gguf", family, shape, arguments.form)
    return 0


if __name__ == "__main__":
    sys.exit(main())
