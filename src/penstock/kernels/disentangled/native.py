"""Disentangled attention by the native kernel (`csrc/disentangled.cpp`)."""

from penstock.kernels.batch import Batch
from penstock.kernels.disentangled import DisentangledOptions
from penstock.native import Library, address, dtype_code
from penstock.native.array import Array
from penstock.native.program import call, empty_rows
from penstock.native.structs import DisentangledArgs

_VECTOR = 16


class DisentangledKernels:
    """See `penstock.kernels.ops.Ops` for the method."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def disentangled_attention(self, qkv: Array, options: DisentangledOptions[Array], batch: Batch) -> Array:
        """
        Raises:
            MemoryError: there is no memory for the scores.
        """
        assert qkv.is_contiguous()
        size, either = qkv.shape[1] // 3, options.keys if options.keys is not None else options.queries
        num_buckets = 0 if either is None else either.shape[2]
        assert num_buckets % _VECTOR == 0
        out = empty_rows(qkv, (size,), qkv.dtype)
        arguments = DisentangledArgs(
            batch=batch.handle,
            qkv=qkv.data_ptr(),
            dtype=dtype_code(qkv.dtype),
            out=out.data_ptr(),
            num_heads=options.num_heads,
            head_dim=size // options.num_heads,
            keys=address(options.keys),
            queries=address(options.queries),
            num_buckets=num_buckets,
            buckets=options.buckets.data_ptr(),
            num_distances=options.buckets.shape[0] // 2,
            scale=options.scale,
        )
        call(self._library, qkv, arguments)
        return out
