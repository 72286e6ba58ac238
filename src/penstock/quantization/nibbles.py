"""Unpacks 4-bit integers from checkpoints: eight per int32, the first one in the lowest bits."""

import torch
from torch import Tensor

PER_WORD = 8


def unpack_words(words: Tensor) -> Tensor:
    """`words` [..., n] int32 -> [..., n, 8] uint8, 0 to 15."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian: byte b has nibbles 2b, 2b + 1
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def unpack_columns(words: Tensor) -> Tensor:
    """`words` [rows, columns / 8] int32 -> [rows, columns] uint8."""
    return unpack_words(words).flatten(-2)


def unpack_rows(words: Tensor) -> Tensor:
    """`words` [rows / 8, columns] int32 -> [columns, rows] uint8: unpacked and transposed."""
    octets = unpack_words(words).view(torch.int64).squeeze(-1)  # [rows / 8, columns], eight nibbles each
    return octets.T.contiguous().view(torch.uint8)
