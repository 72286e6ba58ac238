"""Loads checkpoints whose layers are stored in 4 bits: GPTQ, AWQ and the pack-quantized format of compressed-tensors.

Tensors of a linear layer with `out` rows and `in` columns; n = 8 nibbles per int32:

    GPTQ    qweight [in / n, out]    qzeros [groups, out / n]    scales [groups, out]    g_idx [in]
    AWQ     qweight [in, out / n]    qzeros [groups, out / n]    scales [groups, out]
    packed  weight_packed [out, in / n]    weight_zero_point [out / n, groups]    weight_scale [out, groups]
            weight_shape [2]

w = (q - zero) * scale in all of them. The original GPTQ format stores zero - 1, its second version zero. AWQ's words
hold the columns 0 2 4 6 1 3 5 7. Symmetric packed checkpoints store no zero points: they are 8.

Nothing is rounded, except that scales are converted to float16, the type of GPTQ's and AWQ's scales.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CheckpointError
from penstock.kernels.linear.quantized import Quantized
from penstock.quantization.nibbles import PER_WORD, Bytes, transposed, unpack_columns, unpack_rows, unpack_words
from penstock.quantization.parts import FLOATS, CheckedTensor, TensorPart, Tensors, tensor_group
from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import Scheme
from penstock.quantization.stored import StoredMatrices

_INT32 = ("int32",)


class StoredInt4(StoredMatrices[Scheme]):
    """Loads 4-bit matrices without rounding; embedding and output projection are floating point."""

    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        form = _Form(self._scheme, weight, name, first, count)
        if self._scheme.format == "pack-quantized":
            named = form.packed()
        else:
            named = form.awq() if self._scheme.format == "awq" else form.gptq()
        return {f"{name}.{part}": parameter for part, parameter in named.items()}


class _Form:
    """The tensors of one linear layer in one of the formats."""

    def __init__(self, scheme: Scheme, weight: Fillable, name: str, first: int, count: int) -> None:
        self._weight, self._first = weight, first
        self._rows, self._columns = count, weight.columns
        self._group = scheme.group_size or weight.columns
        self._scheme = scheme
        kept = weight.format.group
        if self._columns % self._group or (self._group % kept and self._group != self._columns):
            raise CheckpointError(
                f"groups of {self._group} columns ({scheme.format}) are not supported for {name}, which has "
                f"{self._columns} columns: groups must be whole rows or multiples of {kept} columns"
            )
        if self._columns % PER_WORD or self._rows % PER_WORD:
            raise CheckpointError(
                f"{name} has the shape [{self._rows}, {self._columns}]: both must be multiples of {PER_WORD}"
            )
        self._groups = self._columns // self._group

    def gptq(self) -> dict[str, Parameter]:
        less = 1 if self._scheme.format == "gptq" else 0

        def finish(tensors: Tensors) -> None:
            zeros = (unpack_columns(tensors["qzeros"]).T + less) & 15
            if self._scheme.symmetric:
                zeros.fill(8)  # quantizers differ in what they store then: 7 or 8
            self._load(unpack_rows(tensors["qweight"]), tensors["scales"].T, zeros)

        order = CheckedTensor(
            np.arange(self._columns) // self._group,
            "groups the columns in the order of their activations (desc_act), which is not supported; "
            "quantize without desc_act, or with static groups",
            is_optional=True,  # absent, the columns are in order
        )
        qweight = TensorPart((self._columns // PER_WORD, self._rows), _INT32)
        return {"g_idx": order, **tensor_group({"qweight": qweight, **self._by_group()}, finish)}

    def awq(self) -> dict[str, Parameter]:
        def finish(tensors: Tensors) -> None:
            values, zeros = (transposed(_awq_columns(tensors[name])) for name in ("qweight", "qzeros"))
            self._load(values, tensors["scales"].T, zeros)

        qweight = TensorPart((self._columns, self._rows // PER_WORD), _INT32)
        return tensor_group({"qweight": qweight, **self._by_group()}, finish)

    def packed(self) -> dict[str, Parameter]:
        parts = {
            "weight_packed": TensorPart((self._rows, self._columns // PER_WORD), _INT32),
            "weight_scale": TensorPart((self._rows, self._groups), FLOATS),
        }
        if not self._scheme.symmetric:
            parts["weight_zero_point"] = TensorPart((self._rows // PER_WORD, self._groups), _INT32)

        def finish(tensors: Tensors) -> None:
            scales, words = tensors["weight_scale"], tensors.get("weight_zero_point")
            zeros = np.full(scales.shape, 8, np.uint8) if words is None else unpack_rows(words).T
            self._load(unpack_columns(tensors["weight_packed"]), scales, zeros)

        shape = CheckedTensor(np.array([self._rows, self._columns]), f"is not [{self._rows}, {self._columns}]")
        return {"weight_shape": shape, **tensor_group(parts, finish)}

    def _by_group(self) -> dict[str, TensorPart]:
        return {
            "qzeros": TensorPart((self._groups, self._rows // PER_WORD), _INT32),
            "scales": TensorPart((self._groups, self._rows), FLOATS),
        }

    def _load(self, values: Bytes, scales: NDArray[Any], zeros: Bytes) -> None:
        """Load `values` [rows, columns] with the checkpoint's `scales` and `zeros` [rows, groups]."""
        with np.errstate(over="ignore"):  # refused below
            scales = scales.astype(np.float16)
        if not bool(np.isfinite(scales).all()):
            raise CheckpointError("belongs to a matrix whose scales are not finite in float16")
        repeats = -(-self._group // self._weight.format.group)
        self._weight.load(self._first, Quantized(values, np.repeat(scales, repeats, 1), np.repeat(zeros, repeats, 1)))


def _awq_columns(words: NDArray[Any]) -> Bytes:
    """Unpack AWQ's `words` [rows, columns / 8] int32 -> [rows, columns]."""
    halves = unpack_words(words).reshape(*words.shape, 2, PER_WORD // 2)  # the even columns, then the odd ones
    columns: Bytes = halves.swapaxes(-1, -2).reshape(len(words), -1)
    return columns
