"""The storage types of a model's matrices in a GGUF file. No torch."""

from collections.abc import Sequence

from penstock.checkpoint.gguf.config import architecture_of
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.checkpoint.gguf.names import stored_names, stream_map
from penstock.config.model_facts import Matrix
from penstock.errors import CheckpointError, shown
from penstock.quantization.scheme import GGUF_FORMATS, GGUFScheme

_FLOATS = {"F32", "F16", "BF16"}


def read_gguf_scheme(file: GGUFFile, matrices: Sequence[Matrix]) -> GGUFScheme | None:
    """Read the storage type of each matrix; None if all are floating point.

    Raises:
        CheckpointError: a matrix is missing, or has an unsupported type.
    """
    architecture, _ = architecture_of(file)
    names = stored_names(architecture, [matrix.name for matrix in matrices])
    types: dict[str, str] = {}
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
        if types[matrix.name] not in GGUF_FORMATS:
            raise CheckpointError(
                f"{file.path} stores its tensor {shown(stored)} as {types[matrix.name]}, which is not supported; "
                f"supported: {', '.join(GGUF_FORMATS)}"
            )
    return None if _FLOATS.issuperset(types.values()) else GGUFScheme(types)


def _apart(stored: str) -> tuple[str, str]:
    """The two tensors that files may have instead of `kv_b_proj`."""
    return stored.replace("attn_kv_b", "attn_k_b"), stored.replace("attn_kv_b", "attn_v_b")
