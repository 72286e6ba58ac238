"""Checkpoints with quantized layers, written by the formats' public definitions, one number at a time.

GPTQ: AutoGPTQ's and GPTQModel's QuantLinear; AWQ: AutoAWQ's WQLinear_GEMM; compressed-tensors: its documentation.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import write_tiny_llama

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Numbers = NDArray[np.int64]


@dataclass
class Map:
    """Of a linear map: integers [out, in], zeros and scales [out, groups]."""

    q: Numbers
    zero: Numbers
    scale: Tensor

    def weight(self) -> Tensor:
        size = self.q.shape[1] // self.zero.shape[1]
        zero, scale = torch.from_numpy(self.zero), self.scale.float()
        return (torch.from_numpy(self.q) - zero.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)


def pack(numbers: Numbers, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit numbers along `axis` to an int32: nibble i is the number `order[i]`."""
    moved = np.moveaxis(numbers, axis, -1)
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for word in range(words.shape[-1]):
        for nibble, place in enumerate(order):
            words[..., word] |= moved[..., 8 * word + place].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def gptq(m: Map, *, zero_less: int = 1) -> dict[str, Tensor]:
    size = m.q.shape[1] // m.zero.shape[1]
    return {
        "qweight": pack(m.q.T, 0),
        "qzeros": pack(m.zero.T - zero_less, 1),
        "scales": m.scale.T.contiguous(),
        "g_idx": torch.arange(m.q.shape[1], dtype=torch.int32) // size,
    }


def auto_round(m: Map) -> dict[str, Tensor]:
    """Without g_idx, as AutoRound writes it."""
    return {part: tensor for part, tensor in gptq(m).items() if part != "g_idx"}


def auto_round_zeros(m: Map) -> dict[str, Tensor]:
    return {part: tensor for part, tensor in gptq_v2(m).items() if part != "g_idx"}


def gptq_v2(m: Map) -> dict[str, Tensor]:
    return gptq(m, zero_less=0)


def gptq_symmetric(m: Map) -> dict[str, Tensor]:
    """As newer quantizers write it: the zero point 8 itself, which the format's first version takes for 9."""
    assert (m.zero == 8).all()
    return gptq(m, zero_less=0)


def gptq_v2_symmetric(m: Map) -> dict[str, Tensor]:
    return gptq(m, zero_less=1)


def awq(m: Map) -> dict[str, Tensor]:
    return {
        "qweight": pack(m.q.T, 1, AWQ_ORDER),
        "qzeros": pack(m.zero.T, 1, AWQ_ORDER),
        "scales": m.scale.T.contiguous(),
    }


def packed_symmetric(m: Map) -> dict[str, Tensor]:
    assert (m.zero == 8).all()
    return _packed(m)


def packed(m: Map) -> dict[str, Tensor]:
    return _packed(m) | {"weight_zero_point": pack(m.zero, 0)}


def _packed(m: Map) -> dict[str, Tensor]:
    return {
        "weight_packed": pack(m.q, 1),
        "weight_scale": m.scale.to(torch.bfloat16).contiguous(),
        "weight_shape": torch.tensor(m.q.shape),
    }


SYMMETRIC = (packed_symmetric, gptq_symmetric, gptq_v2_symmetric)
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


AUTO_ROUND_CONFIG = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": False,
    "data_type": "int",
    "autoround_version": "0.16.1",
    "iters": 200,
    "enable_quanted_input": True,
    "block_name_to_quantize": "model.layers",
}


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False, "actorder": None, **weights},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write_int4(
    folder: Path, form: Callable[[Map], dict[str, Tensor]], config: dict[str, Any], groups: int = 1
) -> dict[str, Map]:
    """A tiny Llama with layers of 4 bits; returns its maps by their names. `groups` to each 128 columns of a row."""
    rng = np.random.default_rng(0)
    maps: dict[str, Map] = {}

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        out, count = shape[0], shape[1] // 128 * groups if groups else 1
        scale = torch.from_numpy(rng.uniform(0.001, 0.02, (out, count))).to(torch.bfloat16).half()  # exact as both
        zero = np.full((out, count), 8) if form in SYMMETRIC else rng.integers(1, 16, (out, count))
        maps[name] = Map(rng.integers(0, 16, shape), zero, scale)
        return form(maps[name])

    write_layers(folder, config, store)
    return maps


def write_int8(folder: Path, config: dict[str, Any], *, per_tensor: bool = False) -> dict[str, Map]:
    """A tiny Llama with layers of 8 bits, by compressed-tensors."""
    rng = np.random.default_rng(0)
    maps: dict[str, Map] = {}

    def store(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        rows = 1 if per_tensor else shape[0]
        scale = torch.from_numpy(rng.uniform(0.0001, 0.002, (rows, 1))).to(torch.bfloat16)
        maps[name] = Map(rng.integers(-128, 128, shape), np.zeros((shape[0], 1), np.int64), scale)
        scale = scale[0] if per_tensor else scale
        return {"weight": torch.from_numpy(maps[name].q).to(torch.int8), "weight_scale": scale}

    write_layers(folder, config, store)
    return maps


def write_layers(
    folder: Path, config: dict[str, Any], store: Callable[[str, tuple[int, int]], dict[str, Tensor]]
) -> None:
    """A tiny Llama whose layers' matrices are what `store` makes of their names and shapes."""
    write_tiny_llama(folder, hidden_size=128, intermediate_size=256, num_attention_heads=8, head_dim=16)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.split(".")[-2] in MAPS]:
        linear = name.removesuffix(".weight")
        out, columns = tensors.pop(name).shape
        tensors |= {f"{linear}.{part}": tensor for part, tensor in store(linear, (out, columns)).items()}
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
