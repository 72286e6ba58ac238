"""Rows of a table by their numbers."""

from torch import Tensor

from penstock.kernels.gather import native, reference

__all__ = ["gather"]


def gather(table: Tensor, row_ids: Tensor) -> Tensor:
    """`table` [rows, ...], `row_ids` [count] int64, each below `rows` -> [count, ...]."""
    return native.gather(table, row_ids) if native.takes(table) else reference.gather(table, row_ids)
