"""The structs that Python passes to the library are those of the headers that it was compiled with."""

import ctypes
import re

import pytest

from penstock import native
from penstock.errors import NativeLibraryError
from penstock.native import Library
from penstock.native.structs import HEADERS, Arguments
from tests.support.needs import LIBRARY, needs_native
from tools import native_structs

SOURCE = "".join(header.read_text() for header in native_structs.HEADERS)


def test_the_structs_are_generated_from_the_headers() -> None:
    assert native_structs.STRUCTS.read_text() == native_structs.generate(SOURCE)


def test_each_operation_has_arguments_of_its_own() -> None:
    numbers = [arguments.operation for arguments in Arguments.__subclasses__()]
    assert sorted(numbers) == list(range(SOURCE.count("    OP(") + 1))


@needs_native
def test_the_library_tells_the_headers_that_it_was_compiled_with() -> None:
    assert LIBRARY is not None
    assert LIBRARY.function("penstock_headers", "", ctypes.c_char_p)().decode() == HEADERS


@needs_native
def test_a_library_of_other_headers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "HEADERS", native_structs.digest(SOURCE.replace("int64_t step;", "int32_t step;")))
    with pytest.raises(NativeLibraryError, match="built from other sources than these: build it anew"):
        Library(native.library_path())


def test_a_comment_makes_no_other_headers_and_a_field_does() -> None:
    assert native_structs.digest(SOURCE + "\n// a remark\n") == HEADERS
    assert native_structs.digest(SOURCE.replace("int64_t first;", "int64_t first, last;", 1)) != HEADERS


def test_a_field_that_cannot_be_read_is_not_left_out() -> None:
    source = SOURCE.replace("struct GateArgs {", "struct GateArgs {\n    int32_t sizes[4];")
    with pytest.raises(ValueError, match=re.escape("int32_t sizes[4]")):
        native_structs.generate(source)


@needs_native
def test_a_library_without_a_function_is_refused_by_the_functions_name() -> None:
    assert LIBRARY is not None
    with pytest.raises(NativeLibraryError, match="no penstock_of_tomorrow; build it anew"):
        LIBRARY.function("penstock_of_tomorrow", "p")
