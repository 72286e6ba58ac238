"""Sampling by the native kernels (`csrc/sampling.cpp`, `csrc/argmax.cpp`, `csrc/penalize.cpp`)."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.sampling import Controls, CountTable, TopkLogprobs
from penstock.native import Library
from penstock.native.array import Array, dtype_name


class SamplingKernels:
    """See `penstock.kernels.ops.Ops` for the methods; logits [rows, vocab] float32 must be contiguous."""

    def __init__(self, library: Library) -> None:
        self._argmax = library.function("penstock_argmax", "pllp")
        self._sample = library.function("penstock_sample", "pllpp", ctypes.c_int32)
        self._topk_logprobs = library.function("penstock_topk_logprobs", "plllpppp")
        self._apply_bitmask = library.function("penstock_apply_bitmask", "plplp")
        self._penalize = library.function("penstock_penalize", "ppl")

    def argmax(self, logits: Array) -> NDArray[np.int64]:
        rows, vocab = _shape(logits)
        tokens = np.empty(rows, np.int64)
        self._argmax(logits.data_ptr(), rows, vocab, _address(tokens))
        return tokens

    def sample(self, logits: Array, controls: Controls) -> NDArray[np.int64]:
        rows, vocab = _shape(logits)
        table = np.stack(controls, axis=1)
        tokens = np.empty(rows, np.int64)
        if self._sample(logits.data_ptr(), rows, vocab, _address(table), _address(tokens)):
            raise MemoryError(f"no memory to sample from {vocab} tokens")
        return tokens

    def topk_logprobs(self, logits: Array, k: int) -> TopkLogprobs:
        rows, vocab = _shape(logits)
        assert k <= vocab
        found = TopkLogprobs(
            np.empty(rows, np.float32),
            np.empty(rows, np.int64),
            np.empty((rows, k), np.float32),
            np.empty((rows, k), np.int64),
        )
        self._topk_logprobs(logits.data_ptr(), rows, vocab, k, *(_address(part) for part in found))
        return found

    def take(self, logits: Array, places: NDArray[np.int64]) -> NDArray[np.float32]:
        taken: NDArray[np.float32] = _flat(logits)[places]
        return taken

    def put(self, logits: Array, places: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        _flat(logits)[places] = values

    def apply_bitmask(self, logits: Array, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
        _, vocab = _shape(logits)
        assert bits.shape == (len(rows), -(-vocab // 32)), "the mask is not as wide as the logits"
        rows, bits = np.ascontiguousarray(rows), np.ascontiguousarray(bits)
        self._apply_bitmask(logits.data_ptr(), vocab, _address(rows), len(rows), _address(bits))

    def penalize(
        self,
        logits: Array,
        rows: NDArray[np.int64],
        penalties: NDArray[np.float64],
        tables: Sequence[CountTable],
        *,
        undo: bool,
    ) -> Callable[[], object] | None:
        assert dtype_name(logits.dtype) == "float32"
        assert logits.is_contiguous()
        penalties = np.ascontiguousarray(penalties)
        lens = [len(table[0]) for table in tables]
        counted = np.zeros((len(rows), 6), np.int64)  # `CountedRow` in C++
        counted[:, 0] = logits.data_ptr() + rows * (logits.shape[-1] * 4)
        counted[:, 1:4] = [[column.buffer_info()[0] for column in table] for table in tables]
        counted[:, 4] = lens
        if undo:
            saved = np.empty(sum(lens), np.float32)
            counted[:, 5] = _address(saved) + 4 * (np.cumsum(lens) - lens)
        self._penalize(_address(counted), _address(penalties), len(rows))
        return functools.partial(_put_back, logits, rows, tables, saved) if undo else None


def _shape(logits: Array) -> tuple[int, int]:
    assert dtype_name(logits.dtype) == "float32"
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    return rows, vocab


def _flat(logits: Array) -> NDArray[np.float32]:
    """[rows * vocab], the logits' memory."""
    rows, vocab = _shape(logits)
    flat: NDArray[np.float32] = logits.numpy().reshape(rows * vocab)
    return flat


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # `ctypes.data` is slower
    return address


def _put_back(
    logits: Array,
    rows: NDArray[np.int64],
    tables: Sequence[CountTable],
    saved: NDArray[np.float32],
) -> None:
    tokens = np.frombuffer(b"".join(table[0] for table in tables), np.int32)
    places = np.repeat(rows * logits.shape[-1], [len(table[0]) for table in tables]) + tokens
    _flat(logits)[places] = saved
