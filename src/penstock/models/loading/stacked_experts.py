"""Presents stacked expert tensors, which hold a matrix of all experts of a layer, as one matrix per expert.

    mlp.experts.gate_up_proj [experts, 2 * inner, hidden]    ->   mlp.experts.0.gate_proj.weight [inner, hidden], ...
    mlp.experts.gate_proj.weight (GGUF's ffn_gate_exps)      ->   the same
    mlp.experts.gate_up_proj_blocks, .._scales, .._bias      ->   mlp.experts.0.gate_proj_blocks, ..

`MixtureSpec` tells whether the rows of gate and up are interleaved, whether the matrices are transposed, and the names
of the stacked tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.layers.mixture import MixtureSpec
from penstock.layers.sum import SumSpec
from penstock.models.loading.loader import OpenWeights, WeightFile
from penstock.models.spec import LayerSpec, ModelSpec

_SUFFIXES = {"": ".weight", ".weight": ".weight", "_bias": ".bias", ".bias": ".bias"}
"""Name suffixes of stacked tensors, with the suffix of one expert's tensor; other suffixes stay the same."""
_STACKED = re.compile(r"(\w+?_proj|w\d)(\W\w+|_[a-z]+|)")
_FUSED = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class ExpertView:
    """The location of an expert's tensor within a stacked tensor."""

    stored: str
    """Name of the stacked tensor."""
    expert: int
    rows: slice
    """Rows within the expert's matrix."""
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    transposed: bool

    def of(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """Extract the tensor from the expert's slice [1, ...] of the stacked tensor."""
        part = tensor[0]
        if part.ndim < len(self.stored_shape) - 1:  # quantized blocks come as flat bytes
            part = part.reshape(self.stored_shape[1], -1)
        return np.ascontiguousarray((part.T if self.transposed else part)[self.rows])


class UnstackedFile:
    """A weight file whose stacked tensors appear as one tensor per expert."""

    def __init__(self, file: WeightFile, views: Mapping[str, ExpertView]) -> None:
        self.path, self._file, self._views = file.path, file, views
        stored = {view.stored for view in views.values()}
        if twice := sorted(views.keys() & file.shapes.keys() - stored):
            raise CheckpointError(f"{file.path} holds {twice[0]}, also as a part of {views[twice[0]].stored}")
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: shape for name, shape in file.shapes.items() if name not in stored},
            **{name: view.shape for name, view in views.items()},
        }

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        with self._file.open() as weights:
            yield _OpenViews(weights, self._views)


class _OpenViews:
    def __init__(self, weights: OpenWeights, views: Mapping[str, ExpertView]) -> None:
        self._weights, self._views = weights, views

    def read(self, name: str, first: int, last: int) -> NDArray[Any]:
        view = self._views.get(name)
        if view is None:
            return self._weights.read(name, first, last)
        return view.of(self._weights.read(view.stored, view.expert, view.expert + 1))[first:last]


def unstacked(files: Sequence[WeightFile], spec: ModelSpec) -> list[WeightFile]:
    """Wrap the files that contain stacked experts, so that each expert's tensors can be read by name."""
    mixtures = {
        f"{layer.name}.{mixture.names.experts}.": mixture for layer in spec.layers for mixture in _mixtures(layer)
    }
    if not mixtures:
        return list(files)
    renamed = {
        f"{layer.name}.{given}": f"{layer.name}.{name}"
        for layer in spec.layers
        for mixture in _mixtures(layer)
        for given, name in mixture.names.stacked
    }
    found: list[WeightFile] = []
    for file in files:
        views: dict[str, ExpertView] = {}
        for name, shape in file.shapes.items():
            stem = name.removesuffix(".weight")
            for part, view in _views(name, name.replace(stem, renamed.get(stem, stem)), shape, mixtures):
                if (other := views.setdefault(part, view)) is not view:
                    raise CheckpointError(f"{file.path} holds {part} in {other.stored} and in {name}")
        found.append(UnstackedFile(file, views) if views else file)
    return found


def _mixtures(layer: LayerSpec) -> Iterator[MixtureSpec]:
    """The layer's mixtures of experts, alone or in a sum of parts."""
    part = None if layer.feed_forward is None else layer.feed_forward.part
    for term in [summand.part for summand in part.summands] if isinstance(part, SumSpec) else [part]:
        if isinstance(term, MixtureSpec):
            yield term


def _views(
    stored: str, name: str, shape: tuple[int, ...], mixtures: Mapping[str, MixtureSpec]
) -> Iterator[tuple[str, ExpertView]]:
    """The experts' tensors in `stored`, with their names; none if it is not stacked.

    Args:
        stored: the tensor's name in the file.
        name: its standard name.
    """
    match = re.fullmatch(r"(.*?\.experts\.)" + _STACKED.pattern, name)
    if match is None or match[1] not in mixtures:
        return
    above, matrix, suffix = match.groups()
    spec = mixtures[above]
    if len(shape) < 2 or shape[0] != spec.routing.num_experts:
        return
    transposed = spec.transposed and suffix in ("", ".weight")
    whole = (shape[2], shape[1]) if transposed else shape[1:]
    named = {_FUSED: (spec.names.gate, spec.names.up), "down_proj": (spec.names.down,)}
    names = named.get(matrix, (matrix,))
    for index, part in enumerate(names):
        size = whole[0] // len(names)
        rows = slice(index, None, len(names)) if spec.interleaved else slice(index * size, (index + 1) * size)
        for expert in range(shape[0]):
            view = ExpertView(stored, expert, rows, (size, *whole[1:]), shape, transposed)
            yield f"{above}{expert}.{part}{_SUFFIXES.get(suffix, suffix)}", view
