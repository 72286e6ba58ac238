"""Compares the mirrors of the library's structs with the layouts that it was compiled with (`csrc/layout.cpp`)."""

import ctypes
from collections.abc import Iterable
from ctypes import c_int64

from penstock.errors import NativeLibraryError
from penstock.native.structs import MIRRORS


class _Field(ctypes.Structure):
    """`Field` of `csrc/layout.cpp`."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", c_int64), ("bytes", c_int64))


class _Layout(ctypes.Structure):
    """`Layout` of `csrc/layout.cpp`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("bytes", c_int64),
        ("fields", ctypes.POINTER(_Field)),
        ("num_fields", c_int64),
    )


def check_layouts(library: ctypes.CDLL, mirrors: Iterable[type[ctypes.Structure]] = MIRRORS) -> None:
    """Compare the size of every struct, and the place and size of every field, with those of the library.

    Raises:
        NativeLibraryError: they differ, or the library is too old to say.
    """
    if not hasattr(library, "penstock_layouts"):
        raise NativeLibraryError("the native library was built from older sources than these: build it anew")
    count = c_int64()
    library.penstock_layouts.restype = ctypes.POINTER(_Layout)
    table = library.penstock_layouts(ctypes.byref(count))
    layouts = {table[index].name.decode(): table[index] for index in range(count.value)}
    for mirror in mirrors:
        name = mirror.__name__
        wanted = _of_library(layouts[name]) if name in layouts else {}
        found = _of_mirror(mirror)
        differing = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
        if differing:
            key = differing[0]
            raise NativeLibraryError(
                f"the native library was built from other sources than these: {name}.{key} has (offset, bytes) "
                f"{wanted.get(key)} there and {found.get(key)} here; build it anew"
            )


def _of_library(layout: _Layout) -> dict[str, tuple[int, int]]:
    fields = {layout.fields[i].name.decode(): layout.fields[i] for i in range(layout.num_fields)}
    return {name: (field.offset, field.bytes) for name, field in fields.items()} | {"*": (0, layout.bytes)}


def _of_mirror(mirror: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    places = {field[0]: getattr(mirror, field[0]) for field in mirror._fields_}
    return {name: (place.offset, place.size) for name, place in places.items()} | {"*": (0, ctypes.sizeof(mirror))}
