"""Sizes of a model for the memory plan: its matrices, and each layer's cache and activations."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from penstock.api.request import MediaKind
from penstock.config.state_layout import part_elements
from penstock.config.weight_formats import WeightFormat
from penstock.dataclass import dataclass

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
    """Whether it is multiplied; False for a table whose rows are only looked up."""


MAX_NATIVE_HEAD = 576
"""Largest head in the native kernels' layout of caches."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values that a layer caches for each token."""

    num_heads: int
    """Number of key heads, and of value heads."""
    head_dim: int
    window: int | None = None
    """Number of keys that a query attends to, including its own; None: all."""
    latent: bool = False
    """Whether the cached keys also serve as values (multi-head latent attention)."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's pool."""
        return block_size * (2 - self.latent) * self.num_heads * head_bytes(self.head_dim, dtype)

    def gap(self, block_size: int) -> str:
        """Name of the attention that the native kernels lack, if they do not support these sizes; else empty."""
        if block_size % 2 == self.head_dim % 4 == 0 and self.head_dim <= MAX_NATIVE_HEAD:
            return ""
        return f"attention with heads of {self.head_dim} elements and blocks of {block_size} tokens"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of fixed size, in float32, that a recurrent layer keeps for each sequence."""

    parts: tuple[tuple[int, ...], ...]
    """Shapes of its tensors."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's pool: one state, each part from a multiple of 64 bytes on."""
        return 4 * sum(map(part_elements, self.parts))


@dataclass(frozen=True, slots=True)
class SharedKV:
    """A layer that reads the keys and values of another layer, and caches none."""

    layer: int
    """Index of the other layer."""

    def block_bytes(self, block_size: int, dtype: KVDType) -> int:
        """Bytes of a block of the layer's own pool."""
        return 0


CacheSpec: TypeAlias = KVSpec | StateSpec | SharedKV


def head_bytes(head_dim: int, dtype: KVDType) -> int:
    """Bytes of one head's key, or value, of a token; int8 includes a scale."""
    return head_dim + 4 if dtype == "int8" else head_dim * BYTES_OF[dtype]


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """Activation elements per token in a part of a layer, without the hidden states."""

    native: int
    """Elements with the native kernels."""
    reference: int
    """Elements with the kernels in plain torch."""
    widest: int
    """Largest input of a linear map; integer kernels make a quantized copy of it."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Sizes of a layer for the memory plan."""

    cache: CacheSpec | None
    """Spec of the layer's cache; None: it has none."""
    activation_sizes: tuple[ActivationSizes, ...]
    """Activations of each of its parts."""


WINDOW_BLOCK = 16
"""Positions in a block of an audio window's keys, which are cached apart from those of texts."""


def blocks_of_window(num_positions: int) -> int:
    """Number of blocks of an audio window."""
    return -(-num_positions // WINDOW_BLOCK)


@dataclass(frozen=True, slots=True)
class TowerFacts:
    """Sizes of a vision or audio tower for the memory plan and the scheduler.

    To them a window of audio is an image: its log-mel features, a row of `width` frames for each of `height` mels.
    """

    num_layers: int
    """Of an audio tower, those that compute keys of the text model's layers included."""
    patch_pixels: int
    """Height and width of a patch, in pixels."""
    layer_elements: int
    """Elements of a layer's matrices: a layer multiplies each by two per patch."""
    hidden_size: int
    num_parameters: int
    """All of the tower and its connector."""
    feature_elements: int
    """Elements of a token's features: the text model's hidden size, times one plus the layers that add features."""
    activation_sizes: ActivationSizes
    """Activation elements per patch."""
    max_tokens: int
    """Largest number of feature vectors that an image, or a tile of it, can have."""
    max_patches: int
    attends_within: bool = False
    """Whether an image's tokens attend to each other in the text model, also to later ones."""
    rope_axes: bool = False
    """Whether the text model's rotary positions have three axes."""
    patch_height: int | None = None
    """Height of a patch that is no square."""
    is_attended: bool = False
    """Whether all tokens of a text attend to features (cross-attention), instead of some tokens being them."""
    early_elements: int = 0
    """Elements of a token's features that are in memory before the last layer, beside the stream."""
    pixel_bytes: int = 3
    """Bytes of a pixel in a request: 8 bits a channel; or those of a float32 feature of audio."""

    @property
    def largest_pixels(self) -> int:
        """Bytes of the largest image in a request."""
        return self.max_patches * self.patch_pixels * (self.patch_height or self.patch_pixels) * self.pixel_bytes

    @property
    def patch_elements(self) -> int:
        """Elements of the row that the first linear map makes a patch of; at least three per pixel."""
        return 3 * self.patch_pixels * (self.patch_height or self.patch_pixels)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a checkpoint from which `settings.resolve` derives settings."""

    name: str
    dtype: DType
    """The checkpoint's dtype."""
    num_parameters: int
    max_position: int
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerFacts, ...]
    rotary_dim: int
    """Rotated elements per head, summed over the model's rotary tables."""
    matrices: tuple[Matrix, ...]
    biased_heads: int = 0
    """Heads with a bias by distance: a table in float32 of two numbers for each position."""
    table_elements: int = 0
    """Elements of tables in float32 that are computed from the weights."""
    idle_elements: int = 0
    """Elements of the matrices of those experts that a token is not routed to, summed over layers."""
    stored_format: str | None = None
    """The checkpoint's name of its quantization; None: not quantized."""
    adapted_rows: int = 0
    """Rows of the matrices that adapters may modify, summed over the kinds of layer parts."""
    halves_kv: bool = False
    """Whether keys and values are cached in 16 bits by default, whatever the dtype."""
    is_encoder: bool = False
    """Whether it is an encoder: it embeds or scores texts, and caches nothing between steps."""
    towers: Mapping[MediaKind, TowerFacts] = field(default_factory=dict)
    """Its encoder of each kind of media that it takes; empty: it takes text only."""
    limit: str = "the model's own"
    """What sets `max_position`, for messages."""
    usual_length: int | None = None
    """Default of `max_model_len`; None: `max_position`."""

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
    """A model, and the precision of its weights, computation and cache."""

    facts: ModelFacts
    dtype: DType
    kv_dtype: KVDType
    quantization: str | None
    """Recipe that quantizes matrices on loading; None: they stay as stored."""
    float16_weights: bool = False
    """Whether floating-point matrices are float16, though `dtype` is float32."""
    widened_weights: bool = False
    """Whether the reference kernels keep quantized and float16 matrices in float32."""
    keeps_hidden: bool = False
    """Whether the cache also stores each token's hidden state, for a multi-token prediction head."""
