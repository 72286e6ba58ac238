"""Facts of a model that memory is planned by: its matrices, and what each layer keeps and needs."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.config.state_layout import part_elements
from penstock.config.weight_formats import WeightFormat

DType = Literal["float32", "bfloat16", "float16"]
BYTES_OF: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KVDType = Literal["float32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a model."""

    name: str
    """Name in the checkpoint, without `.weight`."""
    rows: int
    columns: int
    format: WeightFormat
    """Format in which the checkpoint stores it."""
    multiplied: bool = True
    """False: rows of it are looked up, and that is all."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values that a layer keeps of each token."""

    num_heads: int
    """Heads of keys, and as many of values."""
    head_dim: int
    window: int | None = None
    """Number of keys that a query attends to, including its own; None: all."""
    latent: bool = False
    """Values are the cached keys: there are no separate ones."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's pool."""
        return block_size * (2 - self.latent) * self.num_heads * head_bytes(self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size that a layer keeps of each sequence, in float32."""

    parts: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that it is made of."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's pool: one state, each part from a multiple of 64 bytes on."""
        return 4 * sum(map(part_elements, self.parts))


@dataclass(frozen=True, slots=True)
class SharedKV:
    """Keys and values of another layer, which are kept once, there."""

    layer: int
    """Its index."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's own pool."""
        return 0


CacheSpec: TypeAlias = KVSpec | StateSpec | SharedKV


def head_bytes(head_dim: int, dtype: KVDType) -> int:
    """Bytes of one head's key, or value, of a token: those of int8 have a scale."""
    return head_dim + 4 if dtype == "int8" else head_dim * BYTES_OF[dtype]


@dataclass(frozen=True, slots=True)
class Working:
    """Elements of a token's intermediate results in a part of a layer, beside the hidden states."""

    native: int
    """Elements with the native kernels."""
    reference: int
    """Elements with the kernels in plain torch."""
    widest: int
    """Input of a linear map, which kernels round to integers as a copy."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts of a layer that memory is planned by."""

    cache: CacheSpec | None
    """What the layer caches of a sequence; None: nothing."""
    working: tuple[Working, ...]
    """Intermediate results of each of its parts."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a checkpoint that `settings.resolve` goes by."""

    name: str
    dtype: DType
    """The checkpoint's own."""
    num_parameters: int
    max_position: int
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerFacts, ...]
    rotary_dim: int
    """Elements that are rotated by position, summed over the tables of angles that the model has."""
    matrices: tuple[Matrix, ...]
    stored_format: str | None = None
    """The checkpoint's name for how they are quantized; None: they are not."""
    adapted_rows: int = 0
    """Rows of the matrices that adapters may add to, summed over the kinds of parts of layers."""
    halves_kv: bool = False
    """Whether keys and values are by default cached in 16 bits, whatever the arithmetic."""
    is_encoder: bool = False
    """Whether it embeds or scores, and keeps nothing of a text."""

    @property
    def caches(self) -> tuple[CacheSpec | None, ...]:
        """The cache spec of each layer."""
        return tuple(layer.cache for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence; 0 for a model without recurrent layers."""
        return sum(cache.block_bytes(1, "float32") for cache in self.caches if isinstance(cache, StateSpec))


@dataclass(frozen=True, slots=True)
class ModelPrecision:
    """A model and how it is computed."""

    facts: ModelFacts
    dtype: DType
    kv_dtype: KVDType
    quantization: str | None
    """The recipe that matrices are rounded by as they are loaded; None: they stay as stored."""
    float16_weights: bool = False
    """Whether floating-point matrices are float16, though `dtype` is float32."""
    widened_weights: bool = False
    """Whether the reference kernels keep quantized and float16 matrices in float32."""
    keeps_hidden: bool = False
    """Whether the cache also stores each token's hidden state, for a multi-token prediction head."""
