"""Whether the native library is missing from a checkout that could have it."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import penstock

LIBRARY = Path(penstock.__file__).parent / "native" / "libpenstock.so"
COMPILERS = ("c++", "g++", "clang++")


def explain_missing_library(library: Path = LIBRARY, environment: Mapping[str, str] = os.environ) -> str | None:
    """What to do about a library that is missing, though a compiler is there on a system that it is for; else None.

    PENSTOCK_ISA=reference asks for tests without it.
    """
    path = Path(environment.get("PENSTOCK_LIBRARY") or library)
    if path.exists() or environment.get("PENSTOCK_ISA") == "reference":
        return None
    if sys.platform != "linux":
        return None
    names = [environment["CXX"]] if environment.get("CXX") else COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name, path=environment.get("PATH")))), None)
    if compiler is None:
        return None
    return (
        f"{path} is missing, although there is a compiler, {compiler}: "
        "the tests of the native kernels would be skipped. "
        "Build it (cmake -S . -B build/native && cmake --build build/native), "
        "or set PENSTOCK_ISA=reference to test without it"
    )
