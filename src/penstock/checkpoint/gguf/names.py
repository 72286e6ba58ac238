"""Maps the names of a model's weights to tensor names in GGUF files, with the tables of the package `gguf`."""

import functools
import re
import sys
from collections.abc import Container, Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_LAYER = re.compile(r"\.(\d+)\.")
_GATE_OR_UP = re.compile(r"(\.experts\.)(gate|up)_proj$")
_MTP_HEAD = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)")
_ENCODER = re.compile(r"^(bert|roberta)\.")
"""Prefixes of encoders' names, which the tables do not have."""
_STREAM = re.compile(r"model\.altup_(unembed_)?projections\.(\d+)")
_EXPERT = re.compile(r"(\.experts)\.\d+\.")
_APART = re.compile(r"ffn_(gate|up)_exps$")


_TABLES = {"deepseek32": "glm-dsa", "granite_swa": "granite", "hy_v3": "exaone-moe"}
"""Architectures that the package's tables lack, with others whose names are the same."""
_OTHERS = {
    "granite_swa": {
        "block_sparse_moe.router": "ffn_gate_inp",
        **dict.fromkeys(("block_sparse_moe.experts.gate_proj", "block_sparse_moe.experts.up_proj"), "ffn_gate_up_exps"),
        "block_sparse_moe.experts.down_proj": "ffn_down_exps",
        "shared_mlp.input_linear": "ffn_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    "modern-bert": {"classifier": "cls.output"},
}
"""Names that the tables lack or have for other matrices, by architecture; of a layer without its prefix."""


def stored_names(architecture: str, names: Iterable[str], tensors: Container[str] = ()) -> dict[str, str]:
    """The GGUF names of the weights `names`, without `.weight` and `.bias`; unknown names are left out.

    All experts of a layer map to one stacked tensor.

    Args:
        architecture: the file's `general.architecture`, which must be known.
        tensors: the file's tensors; a converter may have fused the experts' gate and up matrices.
    """
    table = _name_map(architecture)
    found = {}
    for name in names:
        if head := _MTP_HEAD.fullmatch(name):  # the tables have these for few architectures
            found[name] = f"blk.{head[1]}.nextn.{head[2].replace('.', '_')}"
            continue
        if name.endswith(".linear"):  # after the pooling of an encoder
            found[name] = name.removesuffix(".linear")
            continue
        layer = _LAYER.search(name)
        first = _ENCODER.sub("", _LAYER.sub(".0.", without_expert(name), count=1))
        known = (table.get_name(each) for each in (first, _as_converted(first), with_gate_up(first)))
        own_name = _OTHERS.get(architecture, {}).get(first.partition(".0.")[2] or first)
        in_block = own_name if layer is None or own_name is None else f"blk.0.{own_name}"
        stored = in_block or next(filter(None, known), None)
        if stored is not None:
            own = stored if layer is None else stored.replace("blk.0.", f"blk.{layer[1]}.", 1)
            fused = _APART.sub("ffn_gate_up_exps", own)
            found[name] = fused if f"{fused}.weight" in tensors and f"{own}.weight" not in tensors else own
    return found


def stream_map(name: str) -> tuple[str, int] | None:
    """The tensor of all further streams' maps (Gemma 3n) that has the map `name`, and its index there; None: none."""
    found = _STREAM.fullmatch(name)
    return None if found is None else (f"altup_{'unembd_' if found[1] else ''}proj.weight", int(found[2]))


@functools.cache
def _name_map(architecture: str) -> Any:
    """The package's `TensorNameMap`. Its layer 0 stands for all: a table of many layers is slow to build.

    The two modules of tables are loaded into a package of our own, as that of `gguf` imports all of it: 50 ms of each
    start from a GGUF file.
    """
    found = find_spec("gguf")
    assert found is not None
    assert found.submodule_search_locations is not None
    package = ModuleType(f"{__package__}.tables_of_gguf")
    package.__path__ = found.submodule_search_locations
    sys.modules.setdefault(package.__name__, package)
    constants = import_module(".constants", package.__name__)
    listed = _TABLES.get(architecture, architecture)
    (known,) = (key for key, name in constants.MODEL_ARCH_NAMES.items() if name == listed)
    return import_module(".tensor_mapping", package.__name__).get_tensor_name_map(known, 1)


def _as_converted(name: str) -> str:
    """The experts' names in LFM2 and Nemotron-H as llama.cpp's converter renames them: the only ones in the tables."""
    if ".mixer.experts." in name:
        return name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    return name.removeprefix("model.")


def with_gate_up(name: str) -> str:
    """The name with the experts' gate or up matrix replaced by their fused `gate_up_proj`."""
    return _GATE_OR_UP.sub(r"\1gate_up_proj", name)


def without_expert(name: str) -> str:
    """The name without the expert's index."""
    return _EXPERT.sub(r"\1.", name)
