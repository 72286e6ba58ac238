"""A toy family whose layers keep a state, or keys: a convolution and a gated delta rule beside attention."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config.model_facts import ActivationSizes, StateSpec
from penstock.config.state_layout import matrix_state
from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear
from penstock.layers.spec import StepInputs
from penstock.models.families.llama import llama_parts
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec
from penstock.quantization.base import WeightFactory
from tests.support.checkpoints import write_tiny_llama

HEADS, SIZE, TAPS = 2, 16, 4
CHANNELS = 3 * HEADS * SIZE

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
"""Sizes of the hybrids that `transformers` writes."""


@dataclass(frozen=True, slots=True)
class ToyRecurrentSpec:
    hidden_size: int
    rope: None = None

    @property
    def cache(self) -> StateSpec:
        return StateSpec(((TAPS - 1, CHANNELS), matrix_state(HEADS, SIZE, SIZE)))

    @property
    def activation_sizes(self) -> ActivationSizes:
        return ActivationSizes(3 * CHANNELS, 3 * CHANNELS, CHANNELS)

    @property
    def tp_divisor(self) -> int:
        return 1

    def shard(self, tp_size: int) -> "ToyRecurrentSpec":
        return self

    def build(self, factory: WeightFactory) -> "ToyRecurrent":
        return ToyRecurrent(self, factory)


class ToyRecurrent:
    def __init__(self, spec: ToyRecurrentSpec, factory: WeightFactory) -> None:
        self._ops = factory.ops
        self._in = Linear(("recurrent.in_proj",), spec.hidden_size, (CHANNELS + 2 * HEADS,), factory, bias=False)
        self.output = Linear(("recurrent.out_proj",), HEADS * SIZE, (spec.hidden_size,), factory, bias=False)
        self._conv = ConvWeight(factory.tensor("recurrent.taps", TAPS, CHANNELS), None, "silu")
        self._gates = Gates(factory.tensor("recurrent.decay", HEADS), factory.tensor("recurrent.step", HEADS))

    def mix(self, x: Tensor, step: StepInputs, batch: Batch, cache: AnyCache | None) -> Tensor:
        assert isinstance(cache, StateCache)
        taps, memory = cache.parts
        projected = self._in(x)
        qkv = self._ops.causal_conv(projected, ConvColumns(0), self._conv, taps, batch)
        shape = DeltaShape(HEADS, HEADS, SIZE, SIZE)
        return self._ops.gated_delta_rule(qkv, projected, CHANNELS, shape, self._gates, memory, batch)


def toy_hybrid_spec(config: HFConfig) -> ModelSpec:
    """Every second layer has attention."""
    dense = llama_parts(config)
    mixers = (ToyRecurrentSpec(dense.mlp.hidden_size), dense.attention)
    layers = (dense.layer(index, mixers[index % 2], dense.mlp) for index in range(dense.num_layers))
    return replace(dense.model, layers=tuple(layers))


def write_toy_hybrid(folder: Path) -> Path:
    """A random checkpoint of the family, in float32."""
    write_tiny_llama(folder, num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ToyHybridForCausalLM"]}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not (".0.self" in name or ".2.self" in name)}
    random = torch.Generator().manual_seed(1)
    for index in (0, 2):
        shapes = {"in_proj.weight": (CHANNELS + 2 * HEADS, 64), "out_proj.weight": (64, HEADS * SIZE)}
        shapes |= {"taps": (TAPS, CHANNELS), "decay": (HEADS,), "step": (HEADS,)}
        for name, shape in shapes.items():
            kept[f"model.layers.{index}.recurrent.{name}"] = torch.randn(shape, generator=random) * 0.3
    save_file(kept, folder / "model.safetensors")
    return folder
