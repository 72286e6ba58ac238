"""Quantizes a decoder one layer at a time: memory holds one layer and the hidden states of the calibration texts."""

import re
from array import array
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.model_facts import KVSpec
from penstock.core.plan import ForwardPlan
from penstock.dataclass import dataclass
from penstock.kernels.arrays import array_of
from penstock.kernels.attention import CacheShape, LayerCache
from penstock.kernels.batch import Batch
from penstock.kernels.linear.reference import ReferenceWeight
from penstock.kernels.lora import LoraUpdate
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import over_tensors
from penstock.layers.norm import Norm
from penstock.models.decoder import DecoderLayer, PositionTables
from penstock.models.loading.loader import load_weights
from penstock.models.registry import open_weights
from penstock.models.spec import ModelSpec
from penstock.models.stream import Residual, Stream
from penstock.quantization.base import Unquantized, WeightFactory
from penstock.quantization.parameters import FloatRows
from penstock.runner.forward import build_batch

BATCH_TEXTS = 8
"""Batch size in texts."""
_BLOCK_SIZE = 32
_CPU = "cpu"


class ObservedWeight(ReferenceWeight):
    """A float32 weight that accumulates the Gram matrix of its inputs while it is observed."""

    gram: Tensor | None = None
    """[columns, columns]; None: not observed."""

    def linear(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, update: LoraUpdate | None = None) -> Tensor:
        if self.gram is not None:
            self.gram.addmm_(x.T, x)
        return super().linear(x, bias, dtype, update)

    def rows_at(self, first: int, count: int) -> Tensor:
        """[count, columns]"""
        return self._values[first : first + count]


@dataclass(frozen=True, slots=True)
class NamedRows:
    """A matrix of the checkpoint as a range of rows of a layer's weight."""

    name: str
    """Name of the tensor, without `.weight`."""
    weight: ObservedWeight
    first: int
    count: int

    @property
    def values(self) -> Tensor:
        """[count, columns] float32"""
        return self.weight.rows_at(self.first, self.count)


class RoundMatrix(Protocol):
    """Quantizes a matrix of a layer and stores the result."""

    def __call__(self, name: str, weight: Tensor, gram: Tensor) -> Tensor:
        """Returns the dequantized values [rows, columns] float32; `gram`: the Gram matrix of the inputs."""
        ...


class Layerwise:
    """The hidden states of the texts before the next layer."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, ops: Ops, texts: list[list[int]]) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._ops = replace(over_tensors(ops), new_weight=ObservedWeight)
        self._length = len(texts[0])
        factory = self._factory()
        name = f"{spec.names.embedding}.weight"
        table = factory.tensor(name, spec.vocab_size, spec.hidden_size)
        norm = None if spec.embedding_norm is None else Norm(spec.embedding_norm, factory)
        added = None
        if (own := spec.positions) is not None:
            added = factory.tensor(f"{own.name}.weight", own.rows, spec.hidden_size)[own.first :]
        self._load(factory)
        self._positions = PositionTables(spec, self._length, factory)
        self.hidden = [table[torch.tensor(text)] * spec.embedding_multiplier for text in texts]
        """The texts' hidden states, each [length, hidden_size]."""
        if norm is not None:
            self.hidden = [norm(hidden) for hidden in self.hidden]
        if added is not None:
            self.hidden = [hidden + added[: self._length] for hidden in self.hidden]
        self.index = 0
        """Index of the next layer."""

    def advance(self, round_matrix: RoundMatrix) -> None:
        """Quantize the next layer's matrices for their inputs, and compute the inputs of the layer after it."""
        layer, matrices = self._layer()
        observed = {id(matrix.weight): matrix.weight for matrix in matrices}.values()
        for weight in observed:
            weight.gram = torch.zeros(weight.columns, weight.columns)
        self._compute(layer)
        for matrix in matrices:
            assert matrix.weight.gram is not None
            made = round_matrix(matrix.name, matrix.values, matrix.weight.gram)
            matrix.weight.load(matrix.first, array_of(made))
        for weight in observed:
            weight.gram = None
        self.hidden = self._compute(layer)
        self.index += 1

    def skip(self, rounded: "dict[str, Tensor]") -> None:
        """Run the next layer with its matrices from an earlier call, and keep the outputs."""
        layer, matrices = self._layer()
        for matrix in matrices:
            matrix.weight.load(matrix.first, array_of(rounded[matrix.name]))
        self.hidden = self._compute(layer)
        self.index += 1

    def _layer(self) -> tuple[DecoderLayer[Tensor], list[NamedRows]]:
        factory = self._factory()
        layer = DecoderLayer(self._spec.layers[self.index], self._spec.residual_multiplier, factory)
        self._load(factory)
        matrices = []
        for name, rows in factory.parameters.items():
            if isinstance(rows, FloatRows):
                assert isinstance(rows.weight, ObservedWeight)
                matrices.append(NamedRows(name.removesuffix(".weight"), rows.weight, rows.first, rows.shape[0]))
        return layer, matrices

    def _compute(self, layer: DecoderLayer[Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        residual = Residual(self._spec.residual_multiplier, self._ops)
        for first in range(0, len(self.hidden), BATCH_TEXTS):
            part = self.hidden[first : first + BATCH_TEXTS]
            batch, cache, positions = self._batch(len(part))
            self._positions.prepare(batch.positions)
            mixed = layer.mix_tokens(Stream(torch.cat(part)), self._positions.inputs(positions), batch, cache)
            made += torch.split(residual.added(layer.feed_forward(*mixed)), self._length)
        return made

    def _batch(self, count: int) -> tuple[Batch, LayerCache[Tensor], Tensor]:
        """`count` texts from their beginning, and an empty cache for the next layer."""
        kept = self._spec.layers[self.index].facts.cache
        assert isinstance(kept, KVSpec), "of models with other layers than attention nothing is quantized here"
        blocks = -(-self._length // _BLOCK_SIZE)
        shape = CacheShape(
            num_blocks=count * blocks,
            block_size=_BLOCK_SIZE,
            num_heads=kept.num_heads,
            head_dim=kept.head_dim,
            dtype=torch.float32,
            device=_CPU,
            gather_limit=count * blocks * _BLOCK_SIZE,
            latent=kept.latent,
        )
        plan = ForwardPlan(
            query_lens=[self._length] * count,
            starts=[0] * count,
            token_ids=array("i", [0] * (count * self._length)),
            slots=list(range(count)),
            new_blocks=[],
            block_copies=[],
            sampled_rows=[],
        )
        tables = [array("i", range(index * blocks, (index + 1) * blocks)) for index in range(count)]
        batch = build_batch(plan, tables, _BLOCK_SIZE, self._ops, _CPU)
        return batch, self._ops.new_caches([shape]).layers[0], batch.tensor("positions")

    def _factory(self) -> WeightFactory[Tensor]:
        return WeightFactory(Unquantized(), self._ops, torch.float32, _CPU)

    def _load(self, factory: WeightFactory) -> None:
        wanted = "|".join(map(re.escape, factory.parameters))
        files = open_weights(self._checkpoint, self._spec, factory.parameters)
        load_weights(files, factory.parameters, re.compile(f"(?!({wanted})$).*"))
