"""Checkpoints whose layers are stored in 8 bits: the int-quantized format of compressed-tensors, a scale a row."""

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.linear.weight import Weight
from penstock.memory import WeightKind
from penstock.quantization.base import Parameter, Unquantized
from penstock.quantization.parts import FLOATS, TensorPart, tensor_group


class StoredInt8(Unquantized):
    """The layers' matrices as the checkpoint has them; embedding and output projection in floating point."""

    kind: WeightKind = "int8"

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        def finish(tensors: dict[str, Tensor]) -> None:
            scales = tensors[f"{name}.weight_scale"].squeeze(1).float()
            if not bool(scales.isfinite().all()):
                raise CheckpointError("belongs to a linear map whose scales are not finite")
            weight.load_int8(first, tensors[f"{name}.weight"], scales)

        parts = {
            f"{name}.weight": TensorPart((count, weight.columns), (torch.int8,)),
            f"{name}.weight_scale": TensorPart((count, 1), FLOATS),
        }
        return tensor_group(parts, finish)

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        return Unquantized.parameters(self, weight, name, 0, weight.rows)
