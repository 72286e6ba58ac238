"""Unpacks rows of GGUF tensors into their integers, scales and offsets, without rounding.

ggml's types store rows as consecutive blocks of 32 or 256 columns. `gguf.quants` is the reference implementation.
Types with grids and ternary types are in `gguf_grids`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.linear.quantized import Quantized, joined
from penstock.quantization import gguf_grids as grids
from penstock.quantization.nibbles import Bytes
from penstock.quantization.stored_mxfp4 import half_scales

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1; the scale is half of E8M0's in turn."""

_LOWER_4, _LOWER_6, _UPPER_2 = 0x0F0F0F0F, 0x3F3F3F3F, 0x30303030
"""Bits of each of the four bytes of a word."""
_TILE_BYTES = 2**17
"""Bytes unpacked at a time: intermediate results stay in memory that was touched before."""


def quantized_rows(type: str, rows: Bytes, scale: float = 1.0) -> Quantized:
    """Unpack rows to the format of their type in `GGUF_FORMATS`.

    Args:
        type: ggml's name of the type.
        rows: uint8 [n, row_bytes].
        scale: that of the tensor, for NVFP4.
    """
    size, read = _TYPES[type]
    step = max(1, _TILE_BYTES // rows.shape[1])
    tiles = [rows[first : first + step] for first in range(0, len(rows), step)]
    made = joined([read(tile.reshape(len(tile), -1, size)) for tile in tiles])
    return replace(made, super_scales=np.full((len(rows), 1), scale, np.float32)) if type == "NVFP4" else made


def _q8_0(blocks: Bytes) -> Quantized:
    return Quantized(_row(blocks[..., 2:] ^ 128), _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Quantized:
    return Quantized(_row(_nibbles(blocks[..., 2:])), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Quantized:
    return Quantized(_row(_nibbles(blocks[..., 4:])), _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: Bytes) -> Quantized:
    return Quantized(_row(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])), _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Quantized:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Quantized(_row(values), _halves(blocks, 0), -_halves(blocks, 2))


def _q4_k(blocks: Bytes) -> Quantized:
    return _with_minima(blocks, _nibbles(_cut(blocks[..., 16:], 4, 32)))


def _q5_k(blocks: Bytes) -> Quantized:
    upper = _spread(blocks[..., 16:48], 1, 8).reshape(*blocks.shape[:-1], 4, 64)
    return _with_minima(blocks, _nibbles(_cut(blocks[..., 48:], 4, 32)) | upper << np.uint8(4))


def _with_minima(blocks: Bytes, values: Bytes) -> Quantized:
    """Q4_K and Q5_K: 8 scales and minima of 6 bits in 12 bytes; upper bits of the last 4 are in bytes of the first."""
    words = np.ascontiguousarray(blocks[..., 4:16]).view(np.uint32)  # 4 bytes each
    first, second, rest = words[..., 0], words[..., 1], words[..., 2]
    scales = np.stack((first & _LOWER_6, rest & _LOWER_4 | first >> 2 & _UPPER_2), -1).view(np.uint8)
    minima = np.stack((second & _LOWER_6, rest >> 4 & _LOWER_4 | second >> 2 & _UPPER_2), -1).view(np.uint8)
    return Quantized(_row(values), _row(scales), _row(minima), _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: Bytes) -> Quantized:
    values = _nibbles(_cut(blocks[..., :128], 2, 64))  # [..., 2, 128]
    upper = np.ascontiguousarray(_cut(blocks[..., 128:192], 2, 32))
    values |= np.concatenate((upper << 4 & 48, upper << 2 & 48, upper & 48, upper >> 2 & 48), -1)
    scales = _row(blocks[..., 192:208]).view(np.int8)
    return Quantized(_row(values), scales, super_scales=_halves(blocks, 208))


def _q2_k(blocks: Bytes) -> Quantized:
    values = _spread(_cut(blocks[..., 16:80], 2, 32), 2, 4)
    scales, minima = (_row(part).view(np.int8) for part in (blocks[..., :16] & 15, blocks[..., :16] >> 4))
    return Quantized(_row(values), scales, minima, _halves(blocks, 80), _halves(blocks, 82))


def _q3_k(blocks: Bytes) -> Quantized:
    upper = _spread(blocks[..., :32], 1, 8)
    lower = _spread(_cut(blocks[..., 32:96], 2, 32), 2, 4).reshape(*blocks.shape[:-1], 8, 32)
    packed = blocks[..., 96:108]
    scales = np.concatenate((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    scales = (scales | _spread(packed[..., 8:], 2, 4).reshape(*blocks.shape[:-1], -1) << 4).view(np.int8) - 32
    supers = _halves(blocks, 108)
    return Quantized(_row(lower | upper << 2), _row(scales), _row(4 * scales), supers, supers)  # the zero point is 4


def _iq4_nl(blocks: Bytes) -> Quantized:
    return Quantized(_row(_picked(_IQ4_VALUES, 128, _nibbles(blocks[..., 2:]))), _halves(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Quantized:
    lower = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).reshape(*blocks.shape[:-1], -1)
    upper = np.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).reshape(*blocks.shape[:-1], -1)
    scales = (lower | upper << 4).view(np.int8) - 32
    values = _picked(_IQ4_VALUES, 128, _nibbles(_cut(blocks[..., 8:], 8, 16)))
    return Quantized(_row(values), _row(scales), super_scales=_halves(blocks, 0))


def _mxfp4(blocks: Bytes) -> Quantized:
    return Quantized(_row(_picked(_MXFP4_VALUES, 16, _nibbles(blocks[..., 1:]))), half_scales(blocks[..., 0]))


def _nvfp4(blocks: Bytes) -> Quantized:
    """4 scales of E4M3 without a sign, then 16 columns in 8 bytes each: values of E2M1, as of MXFP4."""
    values = _nibbles(_cut(blocks[..., 4:], 4, 8))
    return Quantized(_row(_picked(_MXFP4_VALUES, 32, values)), _row(_E4M3_HALVES[blocks[..., :4]]))


def _cut(packed: Bytes, *sizes: int) -> Bytes:
    """[..., bytes] -> [..., *sizes]."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _row(parts: NDArray[Any]) -> NDArray[Any]:
    return parts.reshape(len(parts), -1)


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at byte `at` of each block: [n, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., bytes] -> [..., 2 * bytes]: all lower nibbles, then all upper ones."""
    packed = np.ascontiguousarray(packed)  # of strided bytes each operation would take several times as long
    return np.concatenate((packed & 15, packed >> 4), -1)


def _spread(packed: Bytes, bits: int, parts: int) -> Bytes:
    """[..., bytes] -> [..., parts, bytes]: the lowest `bits` of each byte, the next ones, and so on."""
    packed = np.ascontiguousarray(packed)
    return np.stack([packed >> (bits * part) & ((1 << bits) - 1) for part in range(parts)], -2)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[..., 4] -> [..., 32]: one bit per column, shifted to bit 4."""
    return _FIFTH_BITS[packed].view(np.uint8).reshape(*packed.shape[:-1], -1)


_FIFTH_BITS = ((np.arange(256)[:, None] >> np.arange(8) & 1) << 4).astype(np.uint8).view(np.uint64)[:, 0]
"""The bits of each byte, the lowest first, as bit 4 of eight bytes."""


def _e4m3_halves() -> NDArray[np.float16]:
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    halves = np.ldexp(np.where(exponent, mantissa + 8, mantissa), np.maximum(exponent, 1) - 11)
    halves[0x7F] = 0
    made: NDArray[np.float16] = halves.astype(np.float16)
    return made


_E4M3_HALVES = _e4m3_halves()
"""Half of the number that each byte of NVFP4's scales encodes; NaN counts as 0."""


def _picked(table: tuple[int, ...], centre: int, nibbles: Bytes) -> Bytes:
    return np.array([value + centre for value in table], np.uint8)[nibbles]


_TYPES: dict[str, tuple[int, Callable[[Bytes], Quantized]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
    "NVFP4": (36, _nvfp4),
    "IQ1_S": (50, grids.iq1_s),
    "IQ1_M": (56, grids.iq1_m),
    "IQ2_XXS": (66, grids.iq2_xxs),
    "IQ2_XS": (74, grids.iq2_xs),
    "IQ2_S": (82, grids.iq2_s),
    "IQ3_XXS": (98, grids.iq3_xxs),
    "IQ3_S": (110, grids.iq3_s),
    "TQ1_0": (54, grids.tq1_0),
    "TQ2_0": (66, grids.tq2_0),
}
"""Bytes per block, and the function that unpacks blocks [n, blocks_per_row, bytes]."""
