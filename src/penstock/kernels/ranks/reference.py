"""Collective operations by torch.distributed: gloo on CPUs, NCCL on GPUs. Ranks gather and copy; nothing is summed."""

import contextlib
import re
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, distributed

from penstock.config.ranks import Ranks
from penstock.errors import DeviceLostError
from penstock.kernels.arrays import array_of, tensor_of
from penstock.native import LOST_WORDS
from penstock.native.array import Array

_CLOSED = re.compile("(?i)connection (was )?(closed|reset)|broken pipe|timed out")


ArrayT = TypeVar("ArrayT", Array, Tensor)


class DistributedCollective:
    """See `penstock.kernels.ranks.Collective` for the methods. They take arrays of native kernels, too, as tensors over
    the same memory; a recorded one raises CannotRecordError.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.ranks = Ranks(distributed.get_rank(group), distributed.get_world_size(group))

    def columns(self, x: ArrayT, total: int, *, first_only: bool = False) -> ArrayT:
        if isinstance(x, Array):
            return Array(array_of(self.columns(tensor_of(x.numpy()), total)))
        size = self.ranks.size
        widths = [len(Ranks(rank, size).own(total)) for rank in range(size)]
        padded = x.new_zeros(len(x), max(widths))
        padded[:, : x.shape[1]] = x
        return torch.cat([part[:, :width] for part, width in zip(self._gather(padded), widths, strict=True)], 1)

    def rows(self, x: ArrayT, owned: ArrayT, total: int) -> ArrayT:
        if isinstance(x, Array):
            return Array(array_of(self.rows(tensor_of(x.numpy()), tensor_of(owned.numpy()), total)))
        ends = [Ranks(rank, self.ranks.size).own(total).stop for rank in range(self.ranks.size)]
        owners = torch.bucketize(owned, torch.tensor(ends, device=owned.device), right=True)
        return self._gather(x.contiguous())[owners, torch.arange(len(x), device=x.device)]

    def _gather(self, x: Tensor) -> Tensor:
        """Gather `x` of every rank: [ranks, *x.shape]."""
        gathered = x.new_empty(self.ranks.size, *x.shape)
        with lost_peers():
            distributed.all_gather(list(gathered.unbind()), x, group=self._group)
        return gathered


@contextlib.contextmanager
def lost_peers() -> Iterator[None]:
    """Context in which torch.distributed's error for a connection that a rank has closed is a `DeviceLostError`."""
    try:
        yield
    except RuntimeError as error:
        if _CLOSED.search(str(error)):
            raise DeviceLostError(LOST_WORDS) from None
        raise
