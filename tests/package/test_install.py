"""A wheel holds the native kernels where a compiler is at hand, and runs without them where none is."""

import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from benchmarks.speed.install import virtual_environment
from penstock import native
from tests.support import library
from tests.support.needs import needs_torch

ROOT = Path(__file__).parents[2]
LIBRARY = "penstock/native/libpenstock.so"
COMPILER = """#!/bin/sh
# Compiles an empty file in place of a kernel, which takes minutes, and links the kernels that are installed.
linked=
for argument; do
    shift
    case $argument in
    */csrc/*.cpp) argument={empty} ;;
    -shared) linked=yes ;;
    *libpenstock.so) out=$argument ;;
    esac
    set -- "$@" "$argument"
done
if [ "$linked" ]; then
    exec cp {library} "$out"
fi
exec {compiler} "$@"
"""

needs_compiler = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in (os.environ.get("CXX", "c++"), "cmake")),
    reason="needs a C++ compiler and CMake",
)


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build from a copy of what git tracks, for one instruction set, without downloads."""
    source = folder / "source"
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        if name.startswith(("src/", "csrc/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["--config-settings=cmake.build-type=Debug", "--config-settings=cmake.define.PENSTOCK_SETS=avx2"]
    command += ["--wheel-dir", str(folder), str(source)]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = folder.glob("penstock-*.whl")
    return wheel


def run_demo(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Ask the demo model in a fresh environment that has the wheel, and this environment's other packages."""
    venv.create(folder / "environment", symlinks=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(paths))  # whose own .pth files (an editable Penstock) are not read
    program = (
        "import sys, penstock.cli, penstock.native\n"
        "print(penstock.native.__file__)\n"
        "penstock.cli.main(['generate', '--temperature', '0', 'What is 37 + 58?'])"
    )
    python = folder / "environment" / "bin" / "python"
    run = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(packages)), run.stdout
    return run


@needs_compiler
@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built here")
def test_a_wheel_built_with_a_compiler_holds_the_kernels_and_answers(tmp_path: Path) -> None:
    """The installation that is tested shows that the kernels compile."""
    compiler, empty = tmp_path / "c++", tmp_path / "empty.cpp"
    empty.touch()
    real = shutil.which(os.environ.get("CXX", "c++"))
    installed = os.environ.get("PENSTOCK_LIBRARY") or library.LIBRARY
    compiler.write_text(COMPILER.format(empty=empty, library=installed, compiler=real))
    compiler.chmod(0o755)
    wheel = build_wheel(tmp_path, CXX=str(compiler))
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()
    run = run_demo(wheel, tmp_path)
    assert "95" in run.stdout
    assert "reference kernels" not in run.stderr


@needs_torch
def test_a_wheel_built_without_a_compiler_says_once_what_is_missing_and_answers(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CXX=str(tmp_path / "no-compiler"))
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY not in names
    assert "penstock/demo/model.safetensors" in names
    run = run_demo(wheel, tmp_path)
    assert "95" in run.stdout
    assert run.stderr.count("were not built") == 1, run.stderr


def test_the_benchmark_of_installs_counts_no_bytecode_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where this process keeps bytecode elsewhere, an environment was made without that of pip, and pip wrote it."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    _, packages = virtual_environment(tmp_path / "environment")
    assert list(packages.glob("pip/__pycache__/*.pyc"))
