"""The storage types of a model's matrices in a GGUF file. No torch."""

import math
import re
import struct
from collections.abc import Sequence

from penstock.checkpoint.gguf.config import architecture_of
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.checkpoint.gguf.names import stored_names, stream_map
from penstock.config.model_facts import Matrix
from penstock.errors import CheckpointError, shown
from penstock.quantization.scheme import GGUF_FORMATS, GGUFScheme

_FLOATS = {"F32", "F16", "BF16"}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def read_gguf_scheme(file: GGUFFile, matrices: Sequence[Matrix]) -> GGUFScheme | None:
    """Read the storage type of each matrix; None if all are floating point.

    Raises:
        CheckpointError: a matrix is missing, or has an unsupported type.
    """
    architecture, _ = architecture_of(file)
    names = stored_names(architecture, [matrix.name for matrix in matrices], file.tensors)
    types: dict[str, str] = {}
    scales: dict[str, float] = {}
    for matrix in matrices:
        stored = f"{names.get(matrix.name, matrix.name)}.weight"
        of_stream = stream_map(matrix.name)
        if of_stream is not None and of_stream[0] in file.tensors:
            continue
        if stored not in file.tensors and all(part in file.tensors for part in _apart(stored)):
            continue
        if stored not in file.tensors:
            raise CheckpointError(f"{file.path} lacks the tensor {shown(stored)}")
        types[matrix.name] = file.tensors[stored].type.name
        if (scale := _nvfp4_scale(file, stored, matrix.name)) is not None:
            scales[matrix.name] = scale
        if types[matrix.name] not in GGUF_FORMATS:
            raise CheckpointError(
                f"{file.path} stores its tensor {shown(stored)} as {types[matrix.name]}, which is not supported; "
                f"supported: {', '.join(GGUF_FORMATS)}"
            )
    return None if _FLOATS.issuperset(types.values()) else GGUFScheme(types, scales)


def scales_of_nvfp4(file: GGUFFile) -> set[str]:
    """Names of the tensors that hold the scales of NVFP4 matrices, and of their inputs, which are not needed: the
    kernels quantize activations by scales of their own.
    """
    stems = {name.removesuffix(".weight") for name, info in file.tensors.items() if info.type.name == "NVFP4"}
    return {f"{stem}.{kind}" for stem in stems for kind in ("scale", "input_scale")}


def _nvfp4_scale(file: GGUFFile, stored: str, matrix: str) -> float | None:
    """The scale of an NVFP4 matrix, or of one of its experts; None if the file has none."""
    info = file.tensors.get(f"{stored.removesuffix('.weight')}.scale")
    if info is None or file.tensors[stored].type.name != "NVFP4":
        return None
    expert = _EXPERT.search(matrix)
    number = 0 if expert is None or info.size == 1 else int(expert[1])
    if info.type.name != "F32" or number >= info.size or (expert is None and info.size != 1):
        raise CheckpointError(
            f"{info.file} has a scale {shown(info.name)} of type {info.type.name} and size {info.size}"
        )
    with info.file.open("rb") as opened:
        opened.seek(info.first + 4 * number)
        scale: float = struct.unpack("<f", opened.read(4))[0]
    if not math.isfinite(scale):
        raise CheckpointError(f"{info.file} has a scale {shown(info.name)} that is not finite")
    return scale


def _apart(stored: str) -> tuple[str, str]:
    """The two tensors that files may have instead of `kv_b_proj`."""
    return stored.replace("attn_kv_b", "attn_k_b"), stored.replace("attn_kv_b", "attn_v_b")
