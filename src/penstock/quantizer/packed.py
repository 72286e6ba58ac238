"""Matrices of integers in compressed-tensors' layout `pack-quantized`, and what config.json says of them.

weight_packed [out, in * bits / 32] int32   the first column in the lowest bits
weight_scale [out, groups]                  of the model's dtype
weight_zero_point [out * bits / 32, groups] int32, along the rows; only where zeros are stored
weight_shape [2] int64
"""

from typing import Any

import torch
from torch import Tensor

from penstock.quantization.gptq import Grid
from penstock.recipes import PackedMatrix


def packed_tensors(name: str, q: Tensor, grid: Grid, dtype: torch.dtype, *, zeros: bool) -> dict[str, Tensor]:
    """The tensors of the matrix `name`; `q` [out, in] uint8."""
    scale = grid.scale.to(dtype)
    assert torch.equal(scale.float(), grid.scale), "a scale is not exact in the model's dtype"
    made = {
        f"{name}.weight_packed": pack_columns(q, grid.bits),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(q.shape),
    }
    if zeros:
        packed = pack_columns(grid.zero.to(torch.uint8).T.contiguous(), grid.bits)
        made[f"{name}.weight_zero_point"] = packed.T.contiguous()
    return made


def pack_columns(values: Tensor, bits: int) -> Tensor:
    """`values` [rows, columns] uint8 of 4 or 8 bits -> [rows, columns * bits / 32] int32."""
    if bits == 4:
        pairs = values.view(len(values), -1, 2)
        values = pairs[..., 0] | (pairs[..., 1] << 4)
    return values.contiguous().view(torch.int32)


def quantization_config(kinds: "dict[str, PackedMatrix]") -> dict[str, Any]:
    """`quantization_config` of config.json; `kinds` by the patterns of the matrices' names, the last one for the rest."""
    groups = {}
    for index, (pattern, kind) in enumerate(kinds.items()):
        weights = {
            "num_bits": kind.bits,
            "type": "int",
            "symmetric": kind.symmetric,
            "strategy": "group",
            "group_size": kind.group,
            "dynamic": False,
            "actorder": None,
        }
        target = "Linear" if pattern == ".*" else f"re:{pattern}$"
        groups[f"group_{index}"] = {
            "targets": [target],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
