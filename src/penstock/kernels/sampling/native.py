"""Tokens from logits by the native kernels, `csrc/sampling.cpp` and `csrc/argmax.cpp`."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.sampling import Controls, TopkLogprobs
from penstock.native import Library


class SamplingKernels:
    """See `penstock.kernels.ops.Ops` for the methods; logits [rows, vocab] float32 are contiguous."""

    def __init__(self, library: Library) -> None:
        self._argmax = library.function("penstock_argmax", "pllp")
        self._sample = library.function("penstock_sample", "pllpp", ctypes.c_int32)
        self._topk_logprobs = library.function("penstock_topk_logprobs", "plllpppp")
        self._apply_bitmask = library.function("penstock_apply_bitmask", "plplp")

    def argmax(self, logits: Tensor) -> Tensor:
        rows, vocab = _shape(logits)
        tokens = torch.empty(rows, dtype=torch.int64)
        self._argmax(logits.data_ptr(), rows, vocab, tokens.data_ptr())
        return tokens

    def sample(self, logits: Tensor, controls: Controls) -> Tensor:
        rows, vocab = _shape(logits)
        table = np.stack(controls, axis=1)
        tokens = torch.empty(rows, dtype=torch.int64)
        if self._sample(logits.data_ptr(), rows, vocab, table.ctypes.data, tokens.data_ptr()):
            raise MemoryError(f"no memory to sample from {vocab} tokens")
        return tokens

    def topk_logprobs(self, logits: Tensor, k: int) -> TopkLogprobs:
        rows, vocab = _shape(logits)
        assert k <= vocab
        tops, totals = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        values, token_ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        results = (tops, totals, values, token_ids)
        self._topk_logprobs(logits.data_ptr(), rows, vocab, k, *(tensor.data_ptr() for tensor in results))
        return TopkLogprobs(*results)

    def apply_bitmask(self, logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
        _, vocab = _shape(logits)
        assert bits.shape == (len(rows), -(-vocab // 32)), "the mask is not as wide as the logits"
        rows, bits = np.ascontiguousarray(rows), np.ascontiguousarray(bits)
        self._apply_bitmask(logits.data_ptr(), vocab, rows.ctypes.data, len(rows), bits.ctypes.data)


def _shape(logits: Tensor) -> tuple[int, int]:
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    return rows, vocab
