"""How long a plain install takes from a clone, what it downloads and takes of the disk, and what each extra adds.

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu python -m benchmarks.speed.install [--extras all]

Clones this checkout's HEAD, makes a virtual environment and runs README's `pip install -c constraints.txt .` without
pip's cache. Sizes are those of the files that pip downloads and of what it writes, bytecode included. CMake and Ninja
are downloaded only where the system has none. The index has torch for CPUs; PyPI's requires gigabytes of CUDA. Writes
results/<machine>/install.json and, with --extras (`all`, or names), extras.json: what each adds to a plain install.
Exits with 1 if a bar is missed.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import report

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MB = 1e6
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
"""Variables of this process that would change the install or its size."""
Rows = dict[str, tuple[float, float | None]]


def size(folder: Path) -> float:
    """MB of a folder's files."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()) / MB


def environment() -> dict[str, str]:
    """The environment of pip."""
    return {name: value for name, value in os.environ.items() if name not in HIDDEN}


def virtual_environment(folder: Path) -> tuple[str, Path]:
    """A new one's interpreter and packages: pip with its bytecode, which an install would otherwise add."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, env=environment())
    (packages,) = folder.glob("lib/python*/site-packages")
    return str(folder / "bin" / "python"), packages


class Pip:
    """The pip of a new virtual environment, in a clone of this checkout."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "clone"
        subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(self.clone)], check=True)
        self.python, self.packages = virtual_environment(folder / "environment")
        self._folder = folder

    def run(self, *arguments: str) -> str:
        command = [self.python, "-m", "pip", "--no-cache-dir", *arguments]
        return subprocess.run(
            command, check=True, cwd=self.clone, env=environment(), stdout=subprocess.PIPE, text=True
        ).stdout

    def frozen(self) -> list[str]:
        """The packages of the environment but for Penstock, with their versions."""
        lines = self.run("list", "--format", "freeze", "--exclude", "pip", "--exclude", "setuptools").splitlines()
        return [line for line in lines if not line.startswith("penstock==")]

    def download(self, requirements: list[str]) -> float:
        """MB of their files."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            self.run("download", "-q", "--no-deps", "--dest", folder, *requirements)
            return size(Path(folder))


def plain_install(pip: Pip) -> Rows:
    before, used = size(pip.packages), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    pip.run("install", "-q", "-c", "constraints.txt", ".")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {
        "pip install of a clone, s": (seconds, 70),
        "pip install of a clone, CPU seconds": (cpu, None),
        "download of a plain install, MB": (pip.download(pip.frozen()), 55),
        "download of CMake, Ninja and scikit-build-core, MB": (
            pip.download(["cmake", "ninja", "scikit-build-core"]),
            None,
        ),
        "disk of a plain install, MB": (size(pip.packages) - before, 190),
    }


def extra(pip: Pip, name: str, requirements: list[str], plain: list[str]) -> Rows:
    """What an extra adds to a plain install."""
    with tempfile.TemporaryDirectory(dir=pip.clone.parent) as folder:
        pip.run("install", "-q", "-c", "constraints.txt", "--target", folder, *requirements)
        listed = pip.run("list", "--format", "freeze", "--path", folder).splitlines()
    added = sorted(set(listed) - set(plain))
    with tempfile.TemporaryDirectory(dir=pip.clone.parent) as folder:
        pip.run("install", "-q", "--no-deps", "--target", folder, *added)
        taken = size(Path(folder))
    return {f"{name}, download, MB": (pip.download(added), None), f"{name}, disk, MB": (taken, None)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="*", default=[])
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = {
        name: requirements for name, requirements in project["optional-dependencies"].items() if name != "dev"
    }
    wanted = list(extras) if args.extras == ["all"] else args.extras
    with tempfile.TemporaryDirectory() as folder:
        pip = Pip(Path(folder))
        missed = report("install", plain_install(pip))
        plain = pip.frozen()
        for name in wanted:
            report("extras", extra(pip, name, extras[name], plain), beside=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
