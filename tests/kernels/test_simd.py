"""The bodies of simd.h give the same bits: those of this machine, and those of ARM under qemu."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = Path(__file__).parent / "simd_functions.cpp"
COMPILE = ("-O1", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT}/csrc")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
ARM = {
    "neon": "armv8-a",
    "neon_dotprod": "armv8.2-a+dotprod",
    "neon_bf16": "armv8.2-a+dotprod+i8mm+bf16",
}
BODIES = {"generic": (), "lane by lane": ("-U__SSE2__", "-mfma")} | {
    name: (f"-march={march}", "-static") for name, march in ARM.items()
}


def digests(folder: Path, body: str, flags: tuple[str, ...]) -> dict[str, str]:
    """A digest of the results of each function."""
    prefix, run = ("aarch64-linux-gnu-", ["qemu-aarch64", "-cpu", "max"]) if body in ARM else ("", [])
    program = folder / "simd_functions"
    command = [f"{prefix}g++", *COMPILE, *flags, str(FUNCTIONS), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    printed = subprocess.run([*run, str(program)], check=True, capture_output=True, text=True, timeout=60).stdout
    return dict(line.rsplit(" ", 1) for line in printed.splitlines())


@pytest.fixture(scope="module")
def of_avx2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if shutil.which("g++") is None or " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and a processor with AVX2")
    return digests(tmp_path_factory.mktemp("avx2"), "avx2", AVX2)


@pytest.mark.parametrize("body", BODIES)
def test_every_function_gives_the_bits_of_avx2(of_avx2: dict[str, str], body: str, tmp_path: Path) -> None:
    for program in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if body in ARM and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt install g++-aarch64-linux-gnu qemu-user)")
    assert digests(tmp_path, body, BODIES[body]) == of_avx2
