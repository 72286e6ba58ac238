"""The linear maps of a model that adapters may modify; every start reads them, few read an adapter."""

import re
from dataclasses import field
from typing import Literal

from penstock.config.model_facts import DType
from penstock.dataclass import dataclass

ExpertsPart = Literal["gate_up", "down"]
"""The maps that a parameter of all experts together has: `gate` and `up`, or `up` alone; or `down`."""
_LAYER_EXPERTS = re.compile(r"(.+\.\d+\.)(?:.+\.)?experts")


@dataclass(frozen=True, slots=True)
class AdaptableExperts:
    """The linear maps of a mixture's experts."""

    count: int
    maps: dict[str, tuple[int, int]]
    """(rows, columns) of each map of an expert, by its name after the expert's number; the last is `down`."""
    interleaved: bool = False
    """Whether an adapter of all experts together has the rows of `gate` and `up` in turn."""

    def shape_of(self, part: ExpertsPart) -> tuple[int, int]:
        """(rows, columns) of the maps of an expert that are one parameter."""
        shapes = list(self.maps.values())
        of_part = shapes[-1:] if part == "down" else shapes[:-1]
        return sum(rows for rows, _ in of_part), of_part[0][1]

    def names_of(self, part: ExpertsPart) -> list[str]:
        """The names of these maps, after the expert's number."""
        return list(self.maps)[-1:] if part == "down" else list(self.maps)[:-1]


@dataclass(frozen=True, slots=True)
class Adaptable:
    """The linear maps of a model that adapters may modify."""

    matrices: dict[str, tuple[int, int]]
    """(rows, columns) of each linear map, by its name in the model."""
    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(vocabulary, columns) of each embedding."""
    experts: dict[str, AdaptableExperts] = field(default_factory=dict)
    """The experts of each mixture, by the prefix of their names, such as `model.layers.0.mlp.experts`."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Replacements of name prefixes, as in `ModelNames`."""
    dtype: DType = "float32"
    """The dtype to which adapter weights are converted."""
    by_head: tuple[str, ...] = ()
    """Those of `matrices` whose heads are used one by one, transposed in part: they take no DoRA."""
    rotated: dict[str, int] = field(default_factory=dict)
    """The head size of queries and keys, by the names of their projections."""
    architecture: str | None = None
    """`general.architecture` of the model's GGUF file; None: it has no such file."""

    def name_of(self, module: str) -> str:
        """The name in the model of a module that PEFT names `module`."""
        for stored, ours in self.prefixes:
            if module.startswith(stored):
                return ours + module.removeprefix(stored)
        return module

    def shape_of(self, matrix: str) -> tuple[int, int] | None:
        """(rows, columns) of a linear map; None: there is none of this name."""
        if matrix in self.matrices:
            return self.matrices[matrix]
        above, _, name = matrix.rpartition(".")
        prefix, _, number = above.rpartition(".")
        experts = self.experts.get(prefix)
        is_one = experts is not None and number.isdecimal() and str(int(number)) == number
        return experts.maps.get(name) if experts and is_one and int(number) < experts.count else None

    def experts_of(self, module: str) -> str | None:
        """The prefix of the experts that `transformers` has in one module; None: it is another module.

        Its name in a layer may differ from that in checkpoints; a layer has at most one such module.
        """
        if module in self.experts:
            return module
        in_layer = _LAYER_EXPERTS.fullmatch(module)
        found = [prefix for prefix in self.experts if in_layer is not None and prefix.startswith(in_layer[1])]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """An adapter's term for one linear map: scale * B (A x)."""

    matrix: str
    """Name of the linear map in the model; of experts together, their prefix."""
    module: str
    """Name of the linear map in the file, where `.lora_A.weight` and `.lora_B.weight` follow it."""
    rank: int
    scale: float
    part: Literal["linear", "embedding"] | ExpertsPart = "linear"
    swapped: bool = False
    """Whether A and B of experts are those of the transposed weight, as earlier versions of PEFT have them."""
    has_magnitude: bool = False
    """Whether the file also has the magnitudes of the rows (DoRA)."""

    @property
    def stored_names(self) -> tuple[str, str]:
        """The names of A and B in the file."""
        if self.part == "embedding":
            return f"{self.module}.lora_embedding_A", f"{self.module}.lora_embedding_B"
        return f"{self.module}.lora_A.weight", f"{self.module}.lora_B.weight"

    @property
    def magnitude_name(self) -> str:
        return f"{self.module}.lora_magnitude_vector"
