"""docs/adding-an-operation.md adds an operation: its steps are followed in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.native_structs import digest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adding-an-operation.md").read_text()
STEP = re.compile(
    r"^(?:New file (?P<new>[^`:]+)|In `(?P<file>[^`]+)`, before `(?P<anchor>[^`]+)`):\n\n```\w+\n(?P<block>.*?)```",
    re.M | re.S,
)
STUBS = """
#include "ops.h"
namespace penstock {
namespace avx2 {
#define STUB(name, Args) __attribute__((weak)) void name(const Args&) {}
PENSTOCK_OPERATIONS(STUB)
#undef STUB
#define STUB(result, name, arguments) __attribute__((weak)) result name arguments { return result(); }
PENSTOCK_FUNCTIONS(STUB)
}
}
"""
USE = """
import sys
# An editable install finds the repository's package first.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import torch
from penstock.kernels.ops import native_ops
from penstock.kernels.reference_ops import reference_ops
from penstock.native import library
x = torch.randn(5, 37).bfloat16() * 3
native, reference = (ops.clamp(x.clone(), 2.0) for ops in (native_ops(library()), reference_ops()))
assert torch.equal(native, reference), (native, reference)
assert native.abs().max() == 2
"""


def run(*command: str, **options: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="compiles for x86-64 with g++")
def test_the_page_adds_an_operation(tmp_path: Path) -> None:
    for folder in ("csrc", "src", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__", "demo"))
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    steps = list(STEP.finditer(PAGE))
    for step in steps:
        if step["new"]:
            (tmp_path / step["new"]).write_text(step["block"])
        else:
            path, block = tmp_path / step["file"], step["block"]
            if step["file"] == "CMakeLists.txt":
                block = block.rstrip("\n")
            before = path.read_text()
            assert step["anchor"] in before, step["anchor"]
            path.write_text(before.replace(step["anchor"], block + step["anchor"], 1))
    assert len({step["new"] or step["file"] for step in steps}) == 7
    run(sys.executable, "-m", "tools.native_structs", cwd=tmp_path)
    build(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PENSTOCK_LIBRARY": str(tmp_path / "libpenstock.so")}
    run(sys.executable, "-c", USE, env={**os.environ, **environment, "PENSTOCK_ISA": "avx2"}, cwd=tmp_path)


def build(tree: Path) -> None:
    """A library with the new operation; the others, whose compilation takes minutes, do nothing in it."""
    (tree / "stubs.cpp").write_text(STUBS)
    headers = "".join((tree / name).read_text() for name in ("csrc/ops.h", "csrc/ranks.h"))
    compiler = ("g++", "-std=c++17", "-O0", "-fPIC", "-mavx2", "-mfma", "-mf16c", "-Icsrc")
    run(*compiler, "-c", "-DPENSTOCK_ISA=avx2", "csrc/table.cpp", "csrc/clamp.cpp", "stubs.cpp", cwd=tree)
    defined = ("-DPENSTOCK_HAS_avx2", f'-DPENSTOCK_HEADERS="{digest(headers)}"')
    common = (f"csrc/{name}.cpp" for name in ("penstock", "threads", "ranks", "penalize"))
    objects = ("table.o", "clamp.o", "stubs.o")
    run(*compiler, "-shared", *defined, *common, *objects, "-o", "libpenstock.so", cwd=tree)
