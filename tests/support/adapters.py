"""Random adapters for tests, as PEFT writes them, and checkpoints that they are merged into."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import Normals, dtype_named
from tests.support.gguf_files import finish, interleave

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION + MLP,
    size: float = 0.15,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """A random adapter of all linear maps of these names of the checkpoint `base`; `changes` go to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    normals = Normals(seed)
    tensors = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            is_embedding = module.endswith("embed_tokens")
            rows, columns = reversed(weight.shape) if is_embedding else weight.shape
            stored = "base_model.model." + module + (".lora_embedding_{}" if is_embedding else ".lora_{}.weight")
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = np.float32(size) * normals.draw(*shape)
                tensors[stored.format(part)] = values.astype(dtype_named(dtype))
            if config["use_dora"]:
                magnitudes = np.linalg.norm(weight.astype(np.float32), axis=1) * (1 + 0.3 * normals.draw(rows))
                tensors[f"base_model.model.{module}.lora_magnitude_vector"] = magnitudes.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint `base` with an adapter's products added to its weights."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    parts = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(base / "model.safetensors")
    for name in parts:
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = (parts[name.replace(".lora_A.", part)].astype(np.float64) for part in (".lora_A.", ".lora_B."))
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight + scale * (b @ a)).astype(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf_adapter(
    path: Path, base: Path, adapter: Path, architecture: str = "llama", kind: str = "F32", **metadata: Any
) -> Path:
    """An adapter of PEFT's as llama.cpp's `convert_lora_to_gguf.py` writes it.

    Args:
        metadata: other values of keys, whose dots are written as two underscores; None leaves one out.
    """
    config = json.loads((base / "config.json").read_text())
    writer = GGUFWriter(None, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"])
    for key, value in metadata.items():
        writer.kv_data[0].pop(key.replace("__", "."), None)
        if isinstance(value, list):
            writer.add_array(key.replace("__", "."), value)
        elif value is not None:
            writer.add_string(key.replace("__", "."), value)
    (known,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, config["num_hidden_layers"])
    for module, (a, b) in _joined_experts(adapter).items():
        stored = names.get_name(module)
        assert stored is not None, module
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(module.rpartition(".")[2])
        if architecture == "llama" and heads is not None:
            b = interleave(b, config[heads])
        for part, values in (("a", a.T if module.endswith("embed_tokens") else a), ("b", b)):
            stored_as = GGMLQuantizationType[kind if values.shape[-1] % 32 == 0 or kind != "Q8_0" else "F16"]
            data = quants.quantize(np.ascontiguousarray(values.astype(np.float32)), stored_as)
            writer.add_tensor(f"{stored}.weight.lora_{part}", data, raw_dtype=stored_as)
    finish(writer, path)
    return path


def _joined_experts(adapter: Path) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """A and B by module, those of a layer's experts in one."""
    parts = load_file(adapter / "adapter_model.safetensors")
    found: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
    for name, a in parts.items():
        module, is_a, end = name.removeprefix("base_model.model.").rpartition(".lora_")
        if is_a and end in ("A.weight", "embedding_A"):
            b = parts[name.replace(f".lora_{end}", f".lora_{end.replace('A', 'B', 1)}")]
            found.setdefault(re.sub(r"\.experts\.\d+", ".experts", module), []).append((a, b))
    return {
        module: pairs[0]
        if ".experts" not in module
        else (np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs]))
        for module, pairs in found.items()
    }
