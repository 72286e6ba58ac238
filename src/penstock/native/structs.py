"""Mirrors of the structs of `csrc/ops.h`; compared with the library's own when it is loaded."""

import ctypes
from collections.abc import Iterable
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

from penstock.errors import NativeLibraryError


class Weight(ctypes.Structure):
    """A packed weight."""

    _fields_ = (
        ("kind", c_int32),
        ("gated", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("data", c_void_p),
        ("row_scales", c_void_p),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_type", c_int32),
        ("offset", c_int32),
        ("offset_type", c_int32),
        ("super_type", c_int32),
        ("super_columns", c_int64),
        ("x_bytes", c_int64),
    )


class LinearArgs(ctypes.Structure):
    """Arguments of `linear`."""

    _fields_ = (
        ("weight", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_dtype", c_int32),
        ("y_dtype", c_int32),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("tokens", c_int64),
        ("bias", c_void_p),
        ("scratch", c_void_p),
        ("after_gate", c_int32),
    )


class UnpackArgs(ctypes.Structure):
    """Arguments of `unpack`."""

    _fields_ = (
        ("weight", c_void_p),
        ("row_ids", c_void_p),
        ("num_rows", c_int64),
        ("y", c_void_p),
        ("y_dtype", c_int32),
    )


class PagedCache(ctypes.Structure):
    """One layer's packed KV cache."""

    _fields_ = (
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("kind", c_int64),
        ("block_stride", c_int64),
        ("data", c_void_p),
    )


class Batch(ctypes.Structure):
    """The ragged batch of a step."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("table_start", c_void_p),
        ("blocks", c_void_p),
        ("slots", c_void_p),
    )


class AttentionArgs(ctypes.Structure):
    """Arguments of `attention`."""

    _fields_ = (
        ("cache", c_void_p),
        ("batch", c_void_p),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("dtype", c_int32),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("threads", c_int32),
        ("scratch", c_void_p),
    )


class RopeArgs(ctypes.Structure):
    """Arguments of `rope_and_cache`."""

    _fields_ = (
        ("cache", c_void_p),
        ("batch", c_void_p),
        ("qkv", c_void_p),
        ("dtype", c_int32),
        ("num_heads", c_int64),
        ("angles", c_void_p),
        ("num_angles", c_int64),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("eps", c_float),
    )


class NormArgs(ctypes.Structure):
    """Arguments of `rms_norm`."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("weight", c_void_p),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("eps", c_float),
        ("factor", c_float),
    )


class GatherArgs(ctypes.Structure):
    """Arguments of `gather`."""

    _fields_ = (
        ("table", c_void_p),
        ("row_bytes", c_int64),
        ("row_ids", c_void_p),
        ("num_rows", c_int64),
        ("y", c_void_p),
    )


class ScaleArgs(ctypes.Structure):
    """Arguments of `scale`."""

    _fields_ = (
        ("x", c_void_p),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("factor", c_float),
    )


class Call(ctypes.Structure):
    """An operation, by its number, and the address of its arguments."""

    _fields_ = (("operation", c_int64), ("arguments", c_void_p))


class Segment(ctypes.Structure):
    """Calls to make one after another over so many rows."""

    _fields_ = (("calls", c_void_p), ("count", c_int64), ("rows", c_int64))


class SampleControls(ctypes.Structure):
    """A row of the table of controls that `sample` takes."""

    _fields_ = tuple((name, c_double) for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "uniform"))


MIRRORS: tuple[type[ctypes.Structure], ...] = (
    Weight,
    LinearArgs,
    UnpackArgs,
    PagedCache,
    Batch,
    AttentionArgs,
    RopeArgs,
    NormArgs,
    GatherArgs,
    ScaleArgs,
    Call,
    Segment,
    SampleControls,
)


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
        NativeLibraryError: they differ, or the library is too old to tell.
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
