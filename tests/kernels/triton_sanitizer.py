"""Triton's interpreter as a sanitizer of addresses, for the launches within `sanitized`.

Every address that a program reads or writes must lie in a tensor of the launch; no program may read or overwrite what
another of the launch wrote, and no store may name an address twice. Programs can run in reversed order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from tests.kernels.triton_interpreter import Builder, interpreter


class AddressError(AssertionError):
    """A kernel's address is wrong."""


class _Launch:
    """The tensors of a launch, and which program wrote an address."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.writers: dict[int, tuple[int, ...]] = {}
        self.program: tuple[int, ...] = ()

    def add(self, tensor: Any) -> None:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            self.ranges.append((first, first + (last + 1) * tensor.element_size()))

    def check(self, pointers: Any, mask: Any, *, write: bool) -> None:
        used = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        addresses: NDArray[np.uint64] = pointers.data[used].ravel()
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        inside = np.zeros(addresses.shape, bool)
        for first, end in self.ranges:
            inside |= (addresses >= first) & (addresses + size <= end)
        verb = "writes" if write else "reads"
        if not inside.all():
            raise AddressError(f"a program {verb} {np.count_nonzero(~inside)} addresses outside of all tensors")
        if write and len(np.unique(addresses)) != len(addresses):
            raise AddressError("a store has an address twice")
        for address in addresses.tolist():
            if self.writers.get(address, self.program) != self.program:
                raise AddressError(f"a program {verb} what another one wrote")
            if write:
                self.writers[address] = self.program


@contextmanager
def sanitized(*, reverse: bool = False) -> Iterator[None]:
    """Check the addresses of all launches.

    Args:
        reverse: run the programs of a launch in reversed order.
    """
    launch = _Launch()
    convert, call = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    load, store, place = Builder.create_masked_load, Builder.create_masked_store, Builder.set_grid_idx

    def launched(executor: Any, *args: Any, **options: Any) -> Any:
        launch.__init__()  # type: ignore[misc]
        return call(executor, *args, **options)

    def converted(argument: Any) -> Any:
        if hasattr(argument, "data_ptr"):
            launch.add(argument)
        return convert(argument)

    def loaded(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launch.check(pointers, mask, write=False)
        return load(builder, pointers, mask, *rest)

    def stored(builder: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        launch.check(pointers, mask, write=True)
        return store(builder, pointers, values, mask, *rest)

    def placed(builder: Any, *index: int) -> None:
        if reverse:
            index = tuple(size - 1 - each for size, each in zip(builder.grid_dim, index, strict=True))
        launch.program = index
        place(builder, *index)

    replaced = {"create_masked_load": loaded, "create_masked_store": stored, "set_grid_idx": placed}
    with (
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.multiple(Builder, **replaced),
    ):
        yield
