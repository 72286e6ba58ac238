"""The native CPU kernels: finds the shared library, chooses the instruction set, and calls it.

The library is built from `csrc/` when the package is installed. Without a compiler it is absent: `library()` is then
None, and the reference kernels are used.

The library has threads of its own, beside torch's: `set_num_threads` holds for both. torch is imported only where it
computes.
"""

import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from penstock.errors import ConfigError, DeviceLostError, NativeLibraryError
from penstock.native.array import Array, dtype_name
from penstock.native.structs import HEADERS, Segment
from penstock.system.extras import require_torch

log = logging.getLogger(__name__)

INSTRUCTION_SETS = (
    ("neon", "neon_dotprod", "neon_bf16")
    if platform.machine() in ("aarch64", "arm64")
    else ("generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
)
EMULATED_SETS = ("amx_emulated", "avx_vnni_emulated")
"""For tests on processors without the sets' instructions."""
LOST = 2
"""Return value of the library's functions if another rank has ended."""
LOST_WORDS = "another rank of the engine has ended"
_ALL_SETS = "pip install -C cmake.define.PENSTOCK_SETS=all builds all"
_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}


class Library:
    """The loaded library, with the selected instruction set; its functions take addresses.

    Raises:
        NativeLibraryError: it was built from other headers than `structs.py` was generated from.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._check_headers()
        self._run = self.function("penstock_run", "pl", ctypes.c_int32)
        self.instruction_set = ""

    def _check_headers(self) -> None:
        told = hasattr(self._library, "penstock_headers")
        if not told or self.function("penstock_headers", "", ctypes.c_char_p)().decode() != HEADERS:
            raise NativeLibraryError("the native library was built from other sources than these: build it anew")

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the kernels multiply in bfloat16, which requires a different weight layout."""
        return self.instruction_set in ("avx512_bf16", "amx", "amx_emulated", "neon_bf16")

    @property
    def built(self) -> list[str]:
        """The instruction sets that it was built with."""
        name_at = self.function("penstock_built", "l", ctypes.c_char_p)
        return [name.decode() for name in itertools.takewhile(bool, map(name_at, itertools.count()))]

    def choose(self, wanted: str) -> bool:
        """Select an instruction set, or the best one if `wanted` is empty; False if the library or machine lacks it."""
        chosen = self.function("penstock_choose", "s", restype=ctypes.c_char_p)(wanted.encode())
        if chosen is not None:
            self.instruction_set = chosen.decode()
        return chosen is not None

    @property
    def num_threads(self) -> int:
        """Number of threads that compute; by default, one for each processor that the caller may use."""
        return int(self.function("penstock_threads", "", ctypes.c_int64)())

    def set_num_threads(self, threads: int) -> None:
        """Set the number of threads that compute, whichever thread calls."""
        self.function("penstock_set_threads", "l")(threads)

    def function(self, name: str, arguments: str, restype: Any = None) -> Callable[..., Any]:
        """The function `name`; `arguments` has one letter per argument: p address, l int64, i int32, f float, s string.

        Raises:
            NativeLibraryError: the library has no function of this name.
        """
        kinds = {
            "p": ctypes.c_void_p,
            "l": ctypes.c_int64,
            "i": ctypes.c_int32,
            "f": ctypes.c_float,
            "s": ctypes.c_char_p,
        }
        if not hasattr(self._library, name):
            raise NativeLibraryError(
                f"the native library was built from other sources than these: no {name}; build it anew"
            )
        function: Any = getattr(self._library, name)
        function.argtypes = [kinds[letter] for letter in arguments]
        function.restype = restype
        return cast("Callable[..., Any]", function)

    def run(self, *segments: Segment) -> None:
        """Execute the recorded calls of these segments in order.

        Raises:
            MemoryError: there is no memory for the kernels' intermediate results (scratch).
            DeviceLostError: another rank has ended.
        """
        failure = self._run((Segment * len(segments))(*segments), len(segments))
        if failure == LOST:
            raise DeviceLostError(LOST_WORDS)
        if failure:
            most = max(segment.rows for segment in segments)
            raise MemoryError(f"no memory for the intermediate results of {most} tokens")


@functools.cache
def library() -> Library | None:
    """The native kernels; None if they were not built, or only for other processors, which is logged once.

    The environment variable PENSTOCK_ISA forces one of INSTRUCTION_SETS, or `reference`, or, in tests, one of
    EMULATED_SETS; PENSTOCK_LIBRARY names another build of the library, such as that of `scripts/sanitize`.

    Raises:
        ConfigError: PENSTOCK_ISA names an instruction set that the library or the machine lacks, or PENSTOCK_LIBRARY no
            library.
        NativeLibraryError: the library was built from other sources.
        MissingTorchError: there are no native kernels, and no torch for the reference.
    """
    wanted = os.environ.get("PENSTOCK_ISA", "")
    path = library_path()
    if wanted == "reference":
        require_torch("PENSTOCK_ISA=reference")
        return None
    if os.environ.get("PENSTOCK_LIBRARY"):
        found = _named_library(path)
    elif path.exists():
        found = Library(path)
    else:
        _check_reference(_why_not_built())
        return None
    if found.choose(wanted):
        return found
    if wanted:
        names = ", ".join([*filter(found.choose, INSTRUCTION_SETS), "reference"])
        is_missing = wanted in INSTRUCTION_SETS and wanted not in found.built
        reason = f"the library was built without it ({_ALL_SETS})" if is_missing else "this machine does not have it"
        raise ConfigError(f"PENSTOCK_ISA={wanted}: {reason}; leave it unset, or choose from {names}")
    _check_reference(f"the native ones were built for {', '.join(found.built)} alone: {_ALL_SETS}")
    return None


def num_threads() -> int:
    """Number of threads that kernels compute with."""
    if (kernels := library()) is not None:
        return kernels.num_threads
    import torch

    return torch.get_num_threads()


def set_num_threads(threads: int) -> None:
    """Set the number of threads that kernels compute with, native and torch's."""
    if (kernels := library()) is not None:
        kernels.set_num_threads(threads)
    if kernels is None or sys.modules.get("torch"):
        import torch

        torch.set_num_threads(threads)


def _check_reference(reason: str) -> None:
    """Log that the reference kernels compute.

    Raises:
        MissingTorchError: they cannot.
    """
    require_torch("the reference kernels", reason)
    log.warning("reference kernels: on a CPU, decoding is 4 to 15 times slower; %s", reason)  # docs/native-kernels.md


def _why_not_built() -> str:
    if platform.system() in ("Linux", "Darwin"):
        return "the native ones were not built: install a C++ compiler (g++ or clang++) and reinstall Penstock"
    return f"the native ones exist for Linux and macOS, not for {platform.system()}"


def _named_library(path: Path) -> Library:
    """
    Raises:
        ConfigError: PENSTOCK_LIBRARY names a file that does not exist or is not a shared library.
    """
    try:
        if path.is_file():
            return Library(path)
        reason = "there is no such file"
    except OSError as error:
        reason = str(error)
    raise ConfigError(
        f"PENSTOCK_LIBRARY={path} cannot be loaded: {reason}; name a build of libpenstock.so, or leave it unset"
    )


@functools.cache
def library_digest() -> bytes:
    """A hash of the library file, so it changes with the sources and the compiler's options."""
    return hashlib.sha256(library_path().read_bytes()).digest()


def library_path() -> Path:
    """The file of the library: `PENSTOCK_LIBRARY`, or the package's own, which may not have been built."""
    return Path(os.environ.get("PENSTOCK_LIBRARY", "") or Path(__file__).parent / "libpenstock.so")


def supports(dtype: Any) -> bool:
    """Whether the kernels support this dtype of numpy or torch."""
    return dtype_name(dtype) in _CODES


def dtype_code(dtype: Any) -> int:
    """The library's code for a dtype of numpy or torch."""
    return _CODES[dtype_name(dtype)]


def address(array: Array | None) -> int | None:
    """Address of an array's first element."""
    return None if array is None else array.data_ptr()


def array_address(array: NDArray[Any] | None) -> int | None:
    """Address of an array's first element."""
    return None if array is None else array.ctypes.data
