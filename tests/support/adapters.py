"""Random adapters for tests, as PEFT writes them, and checkpoints that they are merged into."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import Normals, dtype_named

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
