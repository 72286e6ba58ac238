"""Bytes of a model's weights and of a step's workspace, as the machine's kernels store them."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.config.machine import Machine
from penstock.config.model_facts import BYTES_OF, DType, KVSpec, Matrix, ModelFacts, ModelPrecision
from penstock.config.recipes import RECIPES
from penstock.config.weight_formats import FLOAT, WeightFormat
from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of a step that determine pool and workspace sizes."""

    max_model_len: int
    max_num_seqs: int
    budget: int
    """Maximum tokens that one step computes."""
    block_size: int
    num_branches: int = 0
    """Maximum number of sequences with drafts in one step; each needs a second recurrent state."""


PACKED_BYTES: dict[DType, float] = {"float32": 4.0, "bfloat16": 65 / 32, "float16": 65 / 32}
"""Bytes per element of a floating-point matrix that the native kernels pack, scales included."""
_PACKED_BFLOAT16_BYTES = 1.52
"""Bytes per element of a packed bfloat16 matrix if the kernels multiply bfloat16."""


def widen_weights(models: Sequence[ModelPrecision], machine: Machine) -> list[ModelPrecision]:
    """The models, with quantized and float16 matrices stored as float32 if all weights then take at most half of the
    machine's memory. For reference kernels, which otherwise convert them in every product.
    """
    if machine.device != "cpu" or machine.native:
        return list(models)
    widened = [replace(model, widened_weights=True) for model in models]
    stored, wide = (sum(weight_bytes(model, machine) for model in each) for each in (models, widened))
    return widened if stored < wide <= machine.memory // 2 else list(models)


def weight_bytes(model: ModelPrecision, machine: Machine) -> int:
    facts = model.facts
    recipe = None if model.quantization is None else RECIPES[model.quantization]
    matrices = sum(
        _matrix_bytes(matrix, recipe.format_of(matrix.name) if recipe else matrix.format, model, machine)
        for matrix in facts.matrices
    )
    rest = facts.num_parameters - sum(matrix.rows * matrix.columns for matrix in facts.matrices)
    return int(matrices) + rest * BYTES_OF[model.dtype]


def _matrix_bytes(matrix: Matrix, format: WeightFormat, model: ModelPrecision, machine: Machine) -> float:
    """Bytes of a matrix with its scales, as the machine's kernels store it."""
    native = machine.device == "cpu" and machine.native
    elements = matrix.rows * matrix.columns
    dtype: DType = "float16" if model.float16_weights and matrix.multiplied else model.dtype
    if model.widened_weights and (format is not FLOAT or dtype == "float16"):
        return elements * BYTES_OF["float32"]
    if format is not FLOAT:
        if native:
            return format.packed_bytes(matrix.rows, matrix.columns)
        return elements + 8 * matrix.rows * format.num_groups(matrix.columns)  # a byte each; scale and zero are float32
    if not native or not matrix.multiplied:
        return elements * BYTES_OF[dtype]
    if dtype == "bfloat16" and machine.multiplies_bfloat16:
        return elements * _PACKED_BFLOAT16_BYTES
    return elements * PACKED_BYTES[dtype]


def workspace_bytes(model: ModelPrecision, limits: PoolLimits, samples: int, machine: Machine) -> int:
    """Upper estimate of a step's temporary bytes, including the tables that are made of positions and of weights."""
    facts = model.facts
    positions = 4 * facts.rotary_dim * (limits.max_model_len + limits.budget)
    positions += 4 * (2 * facts.biased_heads * limits.max_model_len + facts.table_elements)
    logits = 4 * samples * facts.vocab_size * 4
    native = machine.device == "cpu" and machine.native
    rest = _native_workspace(model, limits, samples, machine.cores) if native else _reference_workspace(model, limits)
    return positions + logits + rest


def _native_workspace(model: ModelPrecision, limits: PoolLimits, samples: int, cores: int) -> int:
    """Bytes of activations, and of scores for a superblock of 512 keys per thread: the cache is read in place."""
    facts = model.facts
    parts = {part for layer in facts.layers for part in layer.activation_sizes}
    widest = max(facts.hidden_size, *(part.widest for part in parts))
    # a recorded pass reuses memory only between results of equal size, so all kinds of parts add up
    row = (4 * facts.hidden_size + sum(part.native for part in parts)) * BYTES_OF[model.dtype] + 4 * widest
    head_dim = max((cache.head_dim for cache in _kv_specs(facts)), default=0)
    tiles = cores * (2**18 + (limits.max_model_len // 512 + 4) * 16 * (head_dim + 4) * 4)
    return (limits.budget + samples) * row + tiles


def _reference_workspace(model: ModelPrecision, limits: PoolLimits) -> int:
    """Bytes of activations and of the gathered context of a step's sequences, which dominates for long contexts."""
    facts, size = model.facts, BYTES_OF[model.dtype]
    most = max(sum(part.reference for part in layer.activation_sizes) for layer in facts.layers)
    activations = limits.budget * (4 * facts.hidden_size + most) * size
    widest = max((cache.num_heads * cache.head_dim for cache in _kv_specs(facts)), default=0)
    scores = limits.budget * min(limits.max_model_len, 8192) * 4
    return activations + 2 * limits.max_model_len * widest * size * 2 + scores


def _kv_specs(facts: ModelFacts) -> list[KVSpec]:
    return [cache for cache in facts.caches if isinstance(cache, KVSpec)]
