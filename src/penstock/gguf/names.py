"""The tensors of a GGUF file by the names of the model's weights, by the tables of the package `gguf`."""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"\.(\d+)\.")
_GATE_OR_UP = re.compile(r"(\.experts\.)(gate|up)_proj$")
_MTP_HEAD = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)")
_EXPERT = re.compile(r"(\.experts)\.\d+\.")


def stored_names(architecture: str, names: Iterable[str]) -> dict[str, str]:
    """What the file calls the weights `names`, without `.weight` and `.bias`; unknown ones are left out.

    The experts of a layer have one tensor together.

    Args:
        architecture: the file's `general.architecture`, a known one.
    """
    from gguf.constants import MODEL_ARCH_NAMES  # imported when used: it imports numpy
    from gguf.tensor_mapping import get_tensor_name_map

    (known,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(known, 1)  # its first layer stands for all: the table of many takes long to make
    found = {}
    for name in names:
        if head := _MTP_HEAD.fullmatch(name):  # which the tables have for few architectures
            found[name] = f"blk.{head[1]}.nextn.{head[2].replace('.', '_')}"
            continue
        layer = _LAYER.search(name)
        first = _LAYER.sub(".0.", without_expert(name), count=1)
        stored = table.get_name(first) or table.get_name(_as_converted(first)) or table.get_name(with_gate_up(first))
        if stored is not None:
            found[name] = stored if layer is None else stored.replace("blk.0.", f"blk.{layer[1]}.", 1)
    return found


def _as_converted(name: str) -> str:
    """What llama.cpp's converter calls the experts of LFM2 and of Nemotron-H, which the tables know only so."""
    if ".mixer.experts." in name:
        return name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    return name.removeprefix("model.")


def with_gate_up(name: str) -> str:
    """Of the gate, or up, of experts: what files call the two where they have them in one tensor."""
    return _GATE_OR_UP.sub(r"\1gate_up_proj", name)


def without_expert(name: str) -> str:
    """The name without the number of an expert."""
    return _EXPERT.sub(r"\1.", name)
