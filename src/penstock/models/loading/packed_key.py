"""The cache key of packed weights: a digest of everything they depend on. No torch.

Of weight files, the key includes name, size, modification time, the first mebibyte and 64 samples of 4 KiB: hashing all
bytes would take as long as packing them. A change that keeps a file's size and restores its modification time can go
unnoticed. Of code, it includes the contents of the native library and of the modules that read, quantize and pack.
"""

import glob
import hashlib
import json
import os
from functools import cache
from pathlib import Path

from penstock.checkpoint.checkpoint import Checkpoint, weight_files
from penstock.config.ranks import ALONE, Ranks
from penstock.config.recipes import RECIPES
from penstock.config.settings import Settings
from penstock.native import library_digest, library_path
from penstock.system.weight_cache import WeightCache

MIN_BYTES = 4 * 2**20
"""Minimum size of weight files worth caching: smaller models pack in a moment."""
_PACKAGE = Path(__file__).parents[2]
_HEAD_BYTES = 2**20
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_CODE = (
    "kernels",
    "quantization",
    "models",
    "layers",
    "checkpoint/gguf",
    "checkpoint/safetensors.py",
    "config/recipes.py",
    "config/weight_formats.py",
)
_FLAGS = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"} | {
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimddp", "i8mm", "bf16"),  # of ARM
}


def packed_cache(settings: Settings) -> WeightCache | None:
    """The cache of packed weights; None if the user disabled it, or if weights are not packed."""
    is_reference = settings.gap or os.environ.get("PENSTOCK_ISA") == "reference"
    if settings.packed_cache is None or settings.device != "cpu" or is_reference:
        return None
    return WeightCache(Path(settings.packed_cache)) if library_path().exists() else None


def packed_key(checkpoint: Checkpoint, settings: Settings, ranks: Ranks = ALONE) -> str | None:
    """The cache key of a checkpoint's weights with these settings; None if they are not worth caching.

    Raises:
        CheckpointError: the checkpoint has no weights.
    """
    files = list(checkpoint.gguf.files) if checkpoint.gguf is not None else weight_files(checkpoint.path)
    if checkpoint.media is not None:
        files += checkpoint.media.file.files
    try:
        if sum(file.stat().st_size for file in files) < MIN_BYTES:
            return None
        facts = {
            "files": [_identity(file) for file in files],
            "config": checkpoint.config,
            "dtype": (settings.dtype, settings.float16_weights),
            "ranks": (ranks.rank, ranks.size),
            "recipe": None if settings.quantization is None else repr(RECIPES[settings.quantization]),
            "processor": (_processor(), os.environ.get("PENSTOCK_ISA", "")),
            "code": _code(),
        }
    except OSError:
        return None
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def about(checkpoint: Checkpoint, settings: Settings, ranks: Ranks = ALONE) -> str:
    """The weights of a key in words."""
    part = f", rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else ""
    return f"{settings.model_name}, {settings.quantization or settings.dtype}{part} ({checkpoint.path})"


def _identity(path: Path) -> tuple[str, int, int, str]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        digest.update(file.read(_HEAD_BYTES))
        for sample in range(_SAMPLES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, found.st_size * sample // _SAMPLES))
        digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, max(0, found.st_size - _SAMPLE_BYTES)))
    return path.name, found.st_size, found.st_mtime_ns, digest.hexdigest()


@cache
def _processor() -> str:
    """The CPU flags that determine the instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(sorted(_FLAGS.intersection(flags)))


@cache
def _code() -> str:
    """Digest of the native library and of the modules that determine packed weights."""
    digest = hashlib.blake2b(library_digest(), digest_size=16)
    for part in _CODE:
        # strings, as paths would take half as long again
        modules = sorted(glob.glob(f"{part}/**/*.py", root_dir=_PACKAGE, recursive=True)) or [part]
        for module in modules:
            digest.update(f"{module}\0".encode())
            digest.update((_PACKAGE / module).read_bytes())
    return digest.hexdigest()
