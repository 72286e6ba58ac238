"""Sizes read off a build that allocates nothing are those of the weights that a build allocates."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.ranks import Ranks
from penstock.kernels.reference_ops import reference_ops
from penstock.models.decoder import Decoder
from penstock.models.mtp import MTPHead
from penstock.models.registry import read_spec
from penstock.models.sizes import head_sizes, model_sizes
from penstock.models.spec import ModelSpec
from penstock.quantization.base import Unquantized, WeightFactory
from tests.support.families import CASES, SHAPE, class_name
from tests.support.mtp import FAMILIES as WITH_HEAD
from tests.support.mtp import SHAPE as SHAPE_WITH_HEAD

FAMILIES = [
    "llama, all biases",
    "gemma4, per-layer embeddings, shared keys",
    "gemma4 mixture, one expert",
    "olmo2, two to one, biases",
    "phi3",
    "phimoe, biases, sliding, few experts",
    "qwen3-next",
    "granite hybrid, experts",
    "nemotron-h, latent experts, not renormalised",
    "lfm2 moe, not renormalised, no correction",
    "deepseek v2, groups, yarn, biases",
    "gpt-oss",
]


class Counting(WeightFactory):
    """Counts the elements of all weights and tensors that it allocates."""

    counted: list[int]

    def _new_weight(self, *args: Any, **options: Any) -> Any:
        return self._count(super()._new_weight(*args, **options))

    def weight_of(self, *args: Any) -> Any:
        return self._count(super().weight_of(*args))

    def empty(self, *args: Any, **options: Any) -> Any:
        return self._count_elements(super().empty(*args, **options))

    def _tensor(self, *args: Any) -> Any:
        return self._count_elements(super()._tensor(*args))

    def _count_elements(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counted.append(tensor.numel())
        return tensor

    def _count(self, weight: Any) -> Any:
        self.counted.append(weight.rows * weight.columns)
        return weight


def write_config(folder: Path, family: str, config: dict[str, Any]) -> ModelSpec:
    import transformers

    name = class_name(family)
    getattr(transformers, name).config_class(architectures=[name], **config).to_json_file(folder / "config.json")
    return read_spec(open_checkpoint(str(folder)))


def counting(tp_size: int) -> Counting:
    """The factory of the last rank, which plans are made for."""
    collective: Any = SimpleNamespace(ranks=Ranks(tp_size - 1, tp_size))
    factory = Counting(Unquantized(), reference_ops(collective), torch.float32, torch.device("cpu"))
    factory.counted = []
    return factory


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_sizes_are_those_that_a_build_allocates(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    spec = write_config(tmp_path, family, SHAPE | changes)
    for tp_size in (1, 2):
        factory = counting(tp_size)
        Decoder(spec, 8, factory)
        assert model_sizes(spec, tp_size).num_parameters == sum(factory.counted)
        if tp_size == 1:
            shapes = {
                name.removesuffix(".weight"): part.shape
                for name, part in factory.parameters.items()
                if name.endswith(".weight")
            }
            matrices = model_sizes(spec).matrices
            assert matrices
            assert all(shapes[matrix.name] == (matrix.rows, matrix.columns) for matrix in matrices)


def test_a_head_has_its_own_weights_alone(tmp_path: Path) -> None:
    spec = write_config(tmp_path, "Glm4Moe", SHAPE_WITH_HEAD | WITH_HEAD["Glm4Moe"] | {"num_nextn_predict_layers": 1})
    assert spec.mtp is not None
    factory = counting(1)
    MTPHead(spec.mtp, Decoder(spec, 8, counting(1)), 8, factory)
    assert head_sizes(spec).num_parameters == sum(factory.counted)


def test_no_layer_needs_torch_to_state_its_weights() -> None:
    """Not even an annotation of it: a start reads sizes before torch is imported, a simulation without it."""
    code = """
import sys, pkgutil, importlib, penstock.layers, penstock.models.sizes
for module in pkgutil.iter_modules(penstock.layers.__path__):
    if module.name != "rotary":  # its tables are made when a model is loaded
        importlib.import_module(f"penstock.layers.{module.name}")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
