"""Integer matrices in compressed-tensors' layout `pack-quantized`, and `quantization_config`.

weight_packed [out, in * bits / 32] int32   the first column in the lowest bits
weight_scale [out, groups]                  in the model's dtype
weight_zero_point [out * bits / 32, groups] int32, packed along the rows; only for asymmetric formats
weight_shape [2] int64
"""

from typing import Any

import torch
from torch import Tensor

from penstock.config.recipes import PACKED, CheckpointRecipe, PackedMatrix
from penstock.kernels.arrays import array_of, tensor_of
from penstock.quantization.gptq import Grid
from penstock.quantization.nibbles import unpack_columns


def packed_tensors(name: str, q: Tensor, grid: Grid, dtype: torch.dtype, kind: PackedMatrix) -> dict[str, Tensor]:
    """The tensors of the matrix `name`; `q` [out, in] uint8: the quantized integers."""
    scale = grid.scale.to(dtype)
    assert torch.equal(scale.float(), grid.scale), "a scale is not exact in the model's dtype"
    made = {
        f"{name}.weight_packed": _pack_columns(q + kind.shift, kind.bits),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(q.shape),
    }
    if not kind.symmetric:
        packed = _pack_columns(grid.zero.to(torch.uint8).T.contiguous(), kind.bits)
        made[f"{name}.weight_zero_point"] = packed.T.contiguous()
    return made


def unpacked(name: str, tensors: dict[str, Tensor], kind: PackedMatrix) -> Tensor:
    """The dequantized values [out, in] float32 of the matrix `name`."""
    values = _unpack_columns(tensors[f"{name}.weight_packed"], kind.bits).float()
    zero = torch.tensor(2.0 ** (kind.bits - 1))  # of symmetric ones
    if not kind.symmetric:
        words = tensors[f"{name}.weight_zero_point"].T.contiguous()
        zero = _unpack_columns(words, kind.bits).T.float().repeat_interleave(kind.group, 1)
    return (values - zero) * tensors[f"{name}.weight_scale"].float().repeat_interleave(kind.group, 1)


def _unpack_columns(words: Tensor, bits: int) -> Tensor:
    return tensor_of(unpack_columns(array_of(words))) if bits == 4 else words.view(torch.uint8)


def _pack_columns(values: Tensor, bits: int) -> Tensor:
    """`values` [rows, columns] uint8 of 4 or 8 bits -> [rows, columns * bits / 32] int32."""
    if bits == 4:
        pairs = values.view(len(values), -1, 2)
        values = pairs[..., 0] | (pairs[..., 1] << 4)
    return values.contiguous().view(torch.int32)


def quantization_config(recipe: CheckpointRecipe) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    groups = {
        f"group_{index}": _group("Linear" if pattern == ".*" else f"re:{pattern}$", PACKED[format])
        for index, (pattern, format) in enumerate(recipe.layers.choices)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _group(target: str, kind: PackedMatrix) -> dict[str, Any]:
    weights = {
        "num_bits": kind.bits,
        "type": "int",
        "symmetric": kind.symmetric,
        "strategy": "group",
        "group_size": kind.group,
        "dynamic": False,
    }
    return {"targets": [target], "weights": weights, "input_activations": None, "output_activations": None}
