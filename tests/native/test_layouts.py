"""The mirrors of `csrc/ops.h` are those of the library, and one that is not is refused by name."""

import ctypes
from pathlib import Path

import pytest

from penstock import native
from penstock.errors import NativeLibraryError
from penstock.native.layouts import check_layouts
from penstock.native.structs import MIRRORS
from tests.kernels.versions import LIBRARY, needs_native


@pytest.fixture
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(native.__file__).parent / "libpenstock.so"))


def mirror_of(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@needs_native
def test_every_mirror_is_that_of_the_library(library: ctypes.CDLL) -> None:
    check_layouts(library)
    names = {mirror.__name__ for mirror in MIRRORS}
    assert len(names) == len(MIRRORS)
    assert {"Weight", "Call", "SampleControls"} <= names


@needs_native
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ((("calls", ctypes.c_void_p), ("count", ctypes.c_int64)), "rows"),
        ((("calls", ctypes.c_void_p), ("rows", ctypes.c_int64), ("count", ctypes.c_int64)), "count"),
        ((("calls", ctypes.c_void_p), ("count", ctypes.c_int32), ("rows", ctypes.c_int64)), "count"),
        ((("calls", ctypes.c_void_p), ("many", ctypes.c_int64), ("rows", ctypes.c_int64)), "count"),
        (
            (("calls", ctypes.c_void_p), ("count", ctypes.c_int64), ("rows", ctypes.c_int64), ("more", ctypes.c_int8)),
            r"\*",
        ),
    ],
    ids=["a field less", "another order", "another size", "another name", "a field more"],
)
def test_a_mirror_that_differs_is_refused_by_name(
    library: ctypes.CDLL, fields: tuple[tuple[str, type], ...], named: str
) -> None:
    with pytest.raises(NativeLibraryError, match=rf"Segment\.{named} has .* there and .* here; build it anew"):
        check_layouts(library, [mirror_of("Segment", *fields)])


@needs_native
def test_a_mirror_of_what_the_library_does_not_have_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(NativeLibraryError, match=r"NoSuchArgs\.x has \(offset, bytes\) None there"):
        check_layouts(library, [mirror_of("NoSuchArgs", ("x", ctypes.c_int64))])


def test_a_library_that_does_not_tell_its_layouts_is_refused() -> None:
    with pytest.raises(NativeLibraryError, match="built from older sources"):
        check_layouts(ctypes.CDLL(None))


@needs_native
def test_a_library_without_a_function_is_refused_by_the_functions_name() -> None:
    assert LIBRARY is not None
    with pytest.raises(NativeLibraryError, match="no penstock_of_tomorrow; build it anew"):
        LIBRARY.function("penstock_of_tomorrow", "p")
