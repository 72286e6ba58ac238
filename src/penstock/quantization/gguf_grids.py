"""Unpacks rows of GGUF's IQ1, IQ2, IQ3 and TQ types, whose values are points of a grid or ternary, without rounding.

A grid has 4 or 8 columns a point. The package `gguf` has the tables.

    type      w                                   values and scales
    IQ1_S     d (2 s + 1) (g +- 1/8)              g + 1, minus 7 or 9 eighths
    IQ1_M     d (2 s + 1) (g +- 1/8)              8 g +- 1; the sign varies within a group of scales
    IQ2_XXS   d (2 s + 1) / 8 (+- g)              +- g
    IQ2_XS    d (2 s + 1) / 8 (+- g)              +- g; scales are of 16 columns, also of IQ2_S
    IQ3_XXS   d (2 s + 1) / 4 (+- g)              +- g / 2, as all g are even
    IQ3_S     d (2 s + 1) (+- g)                  (15 +- g) / 2, minus 15 / 2, as all g are odd
    TQ        d t                                 t + 1, minus 1

`d` is a float16 per 256 columns, but d / 8 is not always one: super scales are float32.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.linear.quantized import Quantized
from penstock.quantization.nibbles import Bytes

_WORDS = {4: np.uint32, 8: np.uint64}
"""A point's values, a byte each, by its columns."""
_THREE_BITS, _FOUR_SHIFTS = np.uint16(7), np.array((0, 3, 6, 9), np.uint16)


def iq1_s(blocks: Bytes) -> Quantized:
    """Float16, 32 lower bytes of indices; for each 32 columns 4 upper parts, a scale and the sign of 1/8."""
    upper = _words(blocks[..., 34:], np.uint16)  # [n, blocks, 8]
    parts = upper[..., None] >> _FOUR_SHIFTS & _THREE_BITS
    points = _grid("IQ1_S", 1, 1)[_indices(blocks[..., 2:34], parts)]
    scales = (2 * (upper >> 12 & _THREE_BITS) + 1).astype(np.uint8)
    minima = scales * np.where(upper >> 15, 9, 7).astype(np.uint8)
    supers = _scale(blocks[..., :2])
    return Quantized(_values(points), _row(scales), _row(minima), supers, supers * np.float32(1 / 8))


def iq1_m(blocks: Bytes) -> Quantized:
    """32 lower bytes of indices, 16 of upper parts and the signs of 1/8, 4 words of 4 scales and a part of d."""
    packed, words = blocks[..., 32:48], _words(blocks[..., 48:], np.uint16)
    nibbles = np.stack((packed & 15, packed >> 4), -1)  # [n, blocks, 16, 2]
    points = _grid("IQ1_M", 8, 33)[_indices(blocks[..., :32], nibbles & 7)]
    points -= (nibbles >> 3).reshape(points.shape) * np.uint64(0x0202020202020202)
    scales = (2 * (words[..., None] >> _FOUR_SHIFTS & _THREE_BITS) + 1).astype(np.int8)
    super_bits = (words >> 12 << np.array((0, 4, 8, 12), np.uint16)).sum(-1, dtype=np.uint16)
    supers = super_bits.view(np.float16).astype(np.float32) * np.float32(1 / 8)
    return Quantized(_values(points), _row(scales), super_scales=supers)


def iq2_xxs(blocks: Bytes) -> Quantized:
    """Float16; for each 32 columns 4 indices, and the signs and scale that `_signs_and_scales` reads."""
    parts = np.ascontiguousarray(blocks[..., 2:]).reshape(*blocks.shape[:-1], 8, 8)
    signs, scales = _signs_and_scales(parts[..., 4:])
    points = _grid("IQ2_XXS", 1, 128)[parts[..., :4]].reshape(signs.shape)
    return Quantized(_values(_signed(points, signs)), scales, super_scales=_scale(blocks[..., :2], 8))


def iq2_xs(blocks: Bytes) -> Quantized:
    """Float16, 32 words of 9 bits of index and 7 of signs, whose parity is the eighth; 8 bytes of scales."""
    words = _words(blocks[..., 2:66], np.uint16)
    points = _grid("IQ2_XS", 1, 128)[words & np.uint16(511)]
    return _by_16(_signed(points, _masks_of_seven()[words >> np.uint16(9)]), blocks, 66)


def iq2_s(blocks: Bytes) -> Quantized:
    """Float16, 32 lower bytes of indices, 32 of signs, 8 of the indices' upper 2 bits, 8 of scales."""
    upper = blocks[..., 66:74, None] >> np.array((0, 2, 4, 6), np.uint8) & np.uint8(3)
    points = _grid("IQ2_S", 1, 128)[_indices(blocks[..., 2:34], upper)]
    return _by_16(_signed(points, _masks()[blocks[..., 34:66]]), blocks, 74)


def _by_16(points: NDArray[np.uint64], blocks: Bytes, scales_at: int) -> Quantized:
    scales = _nibble_scales(blocks[..., scales_at : scales_at + 8])
    return Quantized(_values(points), scales, super_scales=_scale(blocks[..., :2], 8))


def iq3_xxs(blocks: Bytes) -> Quantized:
    """Float16, 64 indices of 4 columns; for each 32 columns the signs and scale that `_signs_and_scales` reads."""
    signs, scales = _signs_and_scales(blocks[..., 66:])
    points = _eights(_grid("IQ3_XXS", 0.5, 32)[blocks[..., 2:66]])
    values = _values(_signed(points, signs)) & np.uint8(63)  # the complement of 6 bits
    return Quantized(values, np.repeat(scales, 2, -1), super_scales=_scale(blocks[..., :2], 2))


def iq3_s(blocks: Bytes) -> Quantized:
    """Float16, 64 lower bytes of indices of 4 columns, their upper bits, 256 signs, 8 scales."""
    upper = blocks[..., 66:74, None] >> np.arange(8, dtype=np.uint8) & 1
    points = _eights(_grid("IQ3_S", 0.5, 7.5)[_indices(blocks[..., 2:66], upper)])
    values = _values(points ^ _masks()[blocks[..., 74:106]]) & np.uint8(15)  # 15 - value, where the sign is negative
    scales, supers = _nibble_scales(blocks[..., 106:]).view(np.uint8), _scale(blocks[..., :2])
    return Quantized(values, 2 * scales, scales, supers, supers * np.float32(15))


def tq1_0(blocks: Bytes) -> Quantized:
    """5 digits each of 32 and of 16 bytes, 4 of 4 bytes; float16. A byte is a fraction of 256, with ternary digits."""
    parts = [
        _digits()[:count, blocks[..., first:last]] for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    values = [np.moveaxis(part, 0, -2).reshape(*blocks.shape[:-1], -1) for part in parts]
    return _ternary(np.concatenate(values, -1), blocks[..., 52:])


def tq2_0(blocks: Bytes) -> Quantized:
    """4 values in each of 64 bytes, a quarter of 128 columns each; float16."""
    packed = np.ascontiguousarray(blocks[..., :64]).reshape(*blocks.shape[:-1], 2, 1, 32)
    return _ternary(packed >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3), blocks[..., 64:])


def _ternary(values: Bytes, scales: Bytes) -> Quantized:
    halves = np.repeat(_words(scales, np.float16)[..., 0], 2, -1)  # for each 128 columns
    return Quantized(_row(values), halves, np.ones(halves.shape, np.uint8))


def _signs_and_scales(packed: Bytes) -> tuple[NDArray[np.uint64], NDArray[np.int8]]:
    """A word per 32 columns: 4 times 7 bits of signs, whose parity is the eighth sign, and 4 bits of scale.

    Returns masks [n, blocks, 32] of the negative bytes, and scales [n, groups].
    """
    words = _words(packed.reshape(*packed.shape[:2], -1), np.uint32)  # [n, blocks, 8]
    signs = _masks_of_seven()[words[..., None] >> np.array((0, 7, 14, 21), np.uint32) & np.uint32(127)]
    return signs.reshape(*words.shape[:2], 32), _row((2 * (words >> 28) + 1).astype(np.int8))


def _nibble_scales(packed: Bytes) -> NDArray[np.int8]:
    """2 s + 1 of each nibble, the lower of a byte first: [n, groups]."""
    return _row(2 * np.stack((packed & 15, packed >> 4), -1) + 1).view(np.int8)


def _signed(points: NDArray[np.uint64], signs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Negate the bytes of `points` whose mask is set; none of them is 0, which would carry into the next."""
    negated: NDArray[np.uint64] = (points ^ signs) + (signs & np.uint64(0x0101010101010101))
    return negated


def _indices(lower: Bytes, upper: NDArray[Any]) -> NDArray[np.uint16]:
    """Indices of more than 8 bits, [n, blocks, points]."""
    indices: NDArray[np.uint16] = lower | upper.astype(np.uint16).reshape(lower.shape) << np.uint16(8)
    return indices


def _values(points: NDArray[np.uint64]) -> Bytes:
    return _row(points).view(np.uint8)


def _eights(points: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Points of 4 columns as pairs."""
    return points.view(np.uint64)


def _scale(stored: Bytes, divisor: int = 1) -> NDArray[np.float32]:
    """A float16 per block, divided by a power of two: [n, blocks]."""
    scales: NDArray[np.float32] = _words(stored, np.float16)[..., 0].astype(np.float32) / np.float32(divisor)
    return scales


def _words(packed: Bytes, dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(packed).view(dtype)


def _row(parts: NDArray[Any]) -> NDArray[Any]:
    return parts.reshape(len(parts), -1)


@cache
def _grid(type: str, factor: float, centre: float) -> NDArray[Any]:
    """The points of a type's grid, each value times `factor` plus `centre` in a byte of a word."""
    from gguf import quants  # imported lazily

    table = getattr(quants, type)
    table.init_grid()
    values = table.grid.reshape(table.grid_shape) * factor + centre
    points: NDArray[Any] = values.astype(np.uint8).view(_WORDS[values.shape[1]])[:, 0]
    return points


@cache
def _masks() -> NDArray[np.uint64]:
    """For each byte of signs: 8 bytes, all ones where the bit is set; the lowest bit is the first column."""
    bits = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
    masks: NDArray[np.uint64] = (bits * np.uint8(255)).view(np.uint64)[:, 0]
    return masks


@cache
def _masks_of_seven() -> NDArray[np.uint64]:
    """The same for 7 bits; the eighth makes the number of signs even."""
    seven = np.arange(128)
    parity = (seven[:, None] >> np.arange(7) & 1).sum(-1) & 1
    masks: NDArray[np.uint64] = _masks()[seven | parity << 7]
    return masks


@cache
def _digits() -> Bytes:
    """The ternary digits of each byte: [5, 256]."""
    shifted = np.arange(256, dtype=np.uint8) * np.array([[1], [3], [9], [27], [81]], np.uint8)
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8)
