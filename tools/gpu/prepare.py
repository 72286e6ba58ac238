"""Wheels for a machine without a network: downloads them where a registry is reached, and installs them there.

FOLDER/*.whl          what Penstock and the parts import, without torch, numpy and triton
FOLDER/peer-NAME/     a peer with all that it requires, torch included: gigabytes
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.gpu.parts import Facts

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
THERE = ("torch", "numpy", "triton")
"""The machine must have these: they fit its driver, and are too large to carry."""
TESTS = ("hypothesis", "httpx", "openai", "psutil", "pytest", "pytest-timeout", "transformers")
"""Imported by the tests, and by the parts that write random checkpoints."""


def requirements() -> list[str]:
    """Penstock's run-time dependencies, without those that must be there."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)
    assert listed is not None
    found = re.findall(r'^    "([^";]+)"', listed[1], re.M)
    return [each for each in found if re.split(r"[^\w.-]", each)[0] not in THERE]


def prepare(folder: Path, python: str, peers: Sequence[str]) -> int:
    """Download wheels into `folder`. Returns the exit code."""
    code = _download(folder, python, [*requirements(), *TESTS], "-c", str(ROOT / "constraints.txt"))
    for name in THERE:
        for wheel in folder.glob(f"{name}-*.whl"):
            wheel.unlink()
    for peer in peers:
        code = _download(folder / f"peer-{peer}", python, [peer]) or code
    for each in (folder, *(folder / f"peer-{peer}" for peer in peers)):
        sizes = [wheel.stat().st_size for wheel in each.glob("*.whl")]
        print(f"{each}: {len(sizes)} wheels, {sum(sizes) / 2**20:.0f} MiB, for Python {python} on x86-64")
    print(f"on the machine: python tools/gpu_day.py OUT --wheels {folder} (it must have {', '.join(THERE)})")
    return code


def _download(folder: Path, python: str, packages: Sequence[str], *options: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "--only-binary=:all:", *options]
    command += ["--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    return subprocess.run([*command, *packages]).returncode


def install(wheels: Path, site: Path) -> Facts:
    """Install a folder's wheels into the folder `site`, without a network: the outcome of a part."""
    began = time.monotonic()
    files = sorted(map(str, wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    found = {"status": "ok", "facts": {"wheels": len(files)}}
    if not files:
        found = {"status": "failed", "facts": {}, "reason": f"{wheels} has no wheels"}
    else:
        ran = subprocess.run([*command, "--target", str(site), *files], capture_output=True, text=True)
        if ran.returncode:
            found = {"status": "failed", "facts": {}, "reason": f"pip: {ran.stderr.strip()[-500:]}"}
    return found | {"seconds": round(time.monotonic() - began, 1)}
