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
    """The tensors of a launch, each with the program that wrote at each of its bytes (0: none)."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, NDArray[np.int32]]] = []
        self.programs: dict[tuple[int, ...], int] = {}
        self.program = 0

    def begin(self, index: tuple[int, ...]) -> None:
        self.program = self.programs.setdefault(index, len(self.programs) + 1)

    def add(self, tensor: Any) -> None:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            self.tensors.append((tensor.data_ptr(), np.zeros((last + 1) * tensor.element_size(), np.int32)))

    def check(self, pointers: Any, mask: Any, *, write: bool) -> None:
        used = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        addresses = pointers.data[used].ravel().astype(np.int64)
        if not addresses.size:
            return
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        low, high = int(addresses.min()), int(addresses.max())
        inside = np.zeros(addresses.shape, bool)
        touched: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
        for first, writers in self.tensors:  # those of views overlap
            if first <= high and low < first + len(writers):
                offsets = addresses - first
                within = (offsets >= 0) & (offsets + size <= len(writers))
                inside |= within
                touched.append((writers, offsets[within]))
        verb = "writes" if write else "reads"
        if not inside.all():
            raise AddressError(f"a program {verb} {np.count_nonzero(~inside)} addresses outside of all tensors")
        if write and len(np.unique(addresses)) != len(addresses):
            raise AddressError("a store has an address twice")
        for writers, offsets in touched:
            before = writers[offsets]
            if np.any((before != 0) & (before != self.program)):
                raise AddressError(f"a program {verb} what another one wrote")
            if write:
                writers[offsets] = self.program


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
        launch.begin(index)
        place(builder, *index)

    replaced = {"create_masked_load": loaded, "create_masked_store": stored, "set_grid_idx": placed}
    with (
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.multiple(Builder, **replaced),
    ):
        yield
