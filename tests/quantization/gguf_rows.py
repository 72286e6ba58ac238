"""Random rows of every GGUF type that the kernels have a home for."""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

HALVES = {  # where a block has float16: of its scale, and of its minimum
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_rows(type: str, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """`rows` [rows, bytes] of `blocks` blocks each: any bytes, with scales of any finite size and sign."""
    rng = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    data = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    for at in HALVES[type]:
        data[..., at : at + 2] = halves(rng, (rows, blocks))
    if type == "MXFP4":
        data[..., 0] = rng.integers(0, 250, (rows, blocks))
    if type == "IQ1_M":  # its float16 is in the upper nibbles of four words
        data[..., 55] &= 0xBF
    return data.reshape(rows, blocks * size)


def halves(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.uint8]:
    magnitudes = rng.integers(0, 0x5800, shape, np.uint16)  # from 0 to 128
    return (magnitudes | rng.integers(0, 2, shape, np.uint16) << 15)[..., None].view(np.uint8)


def dequantized(type: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """By the package `gguf`."""
    made: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[type])
    return made
