"""Fingerprint of everything but the request that determines an answer's bits: engines with equal ones may take over."""

import hashlib
import os
from pathlib import Path

import numpy as np

from penstock import native
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.settings import Settings
from penstock.runner import torch_device

_DEFINITION = 2
"""Version of what is defined in Python: rotary tables, the rounding of log-probabilities, the heads of encoders."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WEIGHTS = (".safetensors", ".gguf", ".json")


def arithmetic(checkpoint: Checkpoint, settings: Settings) -> str:
    """The fingerprint of a model computed with these settings and this machine's kernels."""
    library = native.library() if settings.device == "cpu" and not settings.gap else None
    digest = hashlib.sha256()
    for fact in (
        "reference" if library is None else library.instruction_set,
        b"" if library is None else native.library_digest(),
        _DEFINITION,
        np.__version__,  # sums of poolings, logarithms of log-probabilities
        *(("", "cpu", "") if library is not None else torch_device.identity(settings.device)),
        f"{settings.dtype} {settings.float16_weights} {settings.widened_weights}",
        settings.kv_cache_dtype,
        settings.quantization or "",
        "" if settings.backend == "penstock" else f"{settings.backend} {_version(settings.backend)}",
        settings.memory.block_size,
        checkpoint_digest(checkpoint.path),
        b"" if checkpoint.media is None else checkpoint_digest(checkpoint.media.file.path),
        checkpoint.hf_overrides or "",
    ):
        digest.update(fact if isinstance(fact, bytes) else f"{fact}\0".encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    from importlib.metadata import version  # here: a start waits 10 ms for it

    return version(package)


def checkpoint_digest(path: Path) -> bytes:
    """Digest of a checkpoint's file names, sizes and content samples, since reading everything would take long."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with open(file, "rb") as content:
            for sample in range(_SAMPLES):
                offset = max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
                digest.update(os.pread(content.fileno(), _SAMPLE_BYTES, offset))
    return digest.digest()
