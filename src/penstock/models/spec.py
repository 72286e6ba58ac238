"""The spec of a model: a list of layers. Plain data, which each family makes of its `config.json`.

A layer has a mixer, which combines tokens (such as attention), and a feed-forward part. Each takes the normalized
residual stream, and its output is added to the stream. `penstock.layers` has the kinds of parts, each with its spec.
"""

import math
from collections.abc import Iterator
from dataclasses import field, replace
from typing import Generic, Literal, TypeVar

from penstock.api.request import MediaKind
from penstock.checkpoint.encoder_config import HeadActivation, Pooling
from penstock.config.model_facts import ActivationSizes, DType, LayerFacts
from penstock.config.ranks import check_divides
from penstock.config.weight_formats import FLOAT, WeightFormat
from penstock.dataclass import dataclass
from penstock.layers.altup import AltUpSpec
from penstock.layers.attention import AttentionSpec
from penstock.layers.convolution import TokenConvolutionSpec
from penstock.layers.cross_attention import CrossAttentionSpec
from penstock.layers.disentangled import DistanceSpec
from penstock.layers.encoder_head import DenseSpec, TokenScoreSpec
from penstock.layers.latent import LatentAttentionSpec
from penstock.layers.per_layer import PerLayerEmbeddingSpec
from penstock.layers.position_bias import AlibiSpec, PositionBiasSpec
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import FeedForwardSpec, MixerSpec, NormSpec, PartSpec, PerLayerInputSpec
from penstock.quantization.scheme import StoredScheme

PartT = TypeVar("PartT", MixerSpec, FeedForwardSpec, PerLayerInputSpec)


@dataclass(frozen=True, slots=True)
class SubLayer(Generic[PartT]):
    """A part of a layer and its norms: `norm_after(part(norm(stream)))` is added to the residual stream.

    With `norm_of_sum` (post-norm), the stream then becomes the norm of the sum.
    """

    part: PartT
    norm: NormSpec | None
    norm_after: NormSpec | None = None
    norm_of_sum: NormSpec | None = None
    input_factor: float = 1.0
    """Factor on the part's input, which then has a norm."""
    output_factor: float = 1.0
    """Factor on the part's output, before `norm_after`."""

    @property
    def norms(self) -> Iterator[NormSpec]:
        """The norms of the sub-layer."""
        yield from (norm for norm in (self.norm, self.norm_after, self.norm_of_sum) if norm is not None)

    def shard(self, tp_size: int) -> "SubLayer[PartT]":
        """The sub-layer with one rank's shard of its part."""
        return replace(self, part=self.part.shard(tp_size))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: a mixer, a feed-forward part, or both; in some models also a per-layer input."""

    name: str
    """Prefix of its tensor names, such as `model.layers.3`."""
    mixer: SubLayer[MixerSpec] | None
    feed_forward: SubLayer[FeedForwardSpec] | None
    per_layer: SubLayer[PerLayerInputSpec] | None = None
    """The part that applies the layer's columns of `ModelSpec.per_layer`."""
    scale: str | None = None
    """Name, within the layer, of the scalar that the residual stream is multiplied by at the end of the layer."""
    parallel: bool = False
    """Whether the feed-forward part takes the same stream as the mixer, and both outputs are added to it together;
    without a norm of its own it takes the mixer's normalized input."""
    altup: AltUpSpec | None = None
    """The residual streams of the model, if there are several."""
    beside: bool = False
    """Whether its mixer takes the normalized input of the previous layer's mixer; both outputs are added to the stream.
    The previous layer has no feed-forward part, and `mixer` here has no norm."""

    @property
    def parts(self) -> Iterator[PartSpec]:
        """The parts that the layer has."""
        if self.mixer is not None:
            yield self.mixer.part
        if self.feed_forward is not None:
            yield self.feed_forward.part
        if self.per_layer is not None:
            yield self.per_layer.part

    def shard(self, tp_size: int) -> "LayerSpec":
        """The spec of one rank's shard of the layer."""
        return replace(
            self,
            mixer=self.mixer and self.mixer.shard(tp_size),
            feed_forward=self.feed_forward and self.feed_forward.shard(tp_size),
            per_layer=self.per_layer and self.per_layer.shard(tp_size),
        )

    @property
    def facts(self) -> LayerFacts:
        """The layer's properties for the memory plan."""
        cache = None if self.mixer is None else self.mixer.part.cache
        activations = tuple(part.activation_sizes for part in self.parts)
        if self.parallel:  # the mixer's output is kept during the feed-forward part
            assert self.mixer is not None
            beside = max(norm.size for norm in self.mixer.norms)
            activations = (
                *activations,
                ActivationSizes(
                    activations[1].native + beside, activations[1].reference + beside, activations[1].widest
                ),
            )
        if self.altup is not None:
            activations = (*activations, self.altup.activation_sizes)
        return LayerFacts(cache, activations)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """A family's weight names outside the layers, without `.weight`. The defaults are Llama's."""

    embedding: str = "model.embed_tokens"
    output: str = "lm_head"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of full tensor names that are not loaded from the checkpoint."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Replacements of name prefixes, (in the checkpoint, here); the first one that matches is applied."""
    transposed: str | None = None
    """Pattern of the full names of matrices that Hugging Face folders store transposed; None: there are none."""


@dataclass(frozen=True, slots=True)
class MTPSpec:
    """A multi-token prediction head; `models/mtp.py` defines its computation. Names are complete."""

    layer: LayerSpec
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: str
    norm: NormSpec

    def as_model(self, target: "ModelSpec") -> "ModelSpec":
        """A model that consists of the head's layer, with all else taken from its target."""
        return replace(target, layers=(self.layer,), mtp=None)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of learned vectors that are added to the token embeddings."""

    name: str
    """In the checkpoint, without `.weight`."""
    rows: int
    padding: int | None = None
    """An encoder's token that has no position and takes the row of its id; positions begin with the row after it. None:
    there is none."""
    first: int = 0
    """Row of position 0, if there is no `padding`; the checkpoint's rows before it are not used."""


HeadPart = DenseSpec | NormSpec | TokenScoreSpec


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What an encoder has before and after its layers. The vectors of several pooling modes are concatenated.

    token ids -> word + position + token type -> norm -> projection -> layers -> pooling -> head -> a vector
    """

    hidden_size: int
    positions: TableSpec | None = None
    token_types: TableSpec | None = None
    """Segment embeddings: whether a token belongs to the first or the second text of a pair."""
    norm: NormSpec | None = None
    """Norm of the sum of all embeddings."""
    projection: DenseSpec | None = None
    """Linear map from the size of the embeddings to `hidden_size`; None: they have that size."""
    distances: DistanceSpec | None = None
    """Vectors of distances, which all layers' disentangled attention projects; None: there are none."""
    convolution: TokenConvolutionSpec | None = None
    """Convolution of the first layer's input, which is added to that layer's output; None: there is none."""
    pooling: tuple[Pooling, ...] = ("mean",)
    padding: int | None = None
    """A token at which no text ends: texts are pooled without those at their end. None: there is none."""
    head: tuple[HeadPart, ...] = ()

    @property
    def embedding_size(self) -> int:
        """Size of the embeddings of words, positions and token types."""
        return self.hidden_size if self.projection is None else self.projection.in_size

    @property
    def vector_size(self) -> int:
        """Size of a text's vector."""
        size = self.hidden_size * len(self.pooling)
        for part in self.head:
            size = part.out_size if isinstance(part, DenseSpec) else 1 if isinstance(part, TokenScoreSpec) else size
        return size


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """A tower's linear map of a patch's pixels."""

    name: str
    size: int
    """Height and width of a patch, in pixels."""
    bias: bool
    frames: int | None = None
    """Frames of a three-dimensional convolution, whose weights are added, as a still is that many equal frames; None:
    the convolution has two dimensions."""
    flat: Literal["pixels", "channels"] | None = None
    """Order of the columns, where the checkpoint has a matrix instead of a convolution: pixels, with their channels
    side by side, or channels, each with its pixels. None: it has a convolution."""


@dataclass(frozen=True, slots=True)
class PatchPositions:
    """Position embeddings of patches."""

    name: str
    """Complete name of the tensor."""
    side: int
    """Rows and columns of the grid that was learned."""
    kind: Literal["nearest", "bilinear", "antialiased", "axes"] = "nearest"
    """How a picture's patches take vectors from the grid: of the nearest position; resampled bilinearly, corners on
    corners, or edges on edges with an antialiasing filter; or the sum of a vector of the column and one of the row,
    from tensors [2, side]."""
    class_row: Literal["first", "last"] | None = None
    """Where the table has one more vector, that of `TowerSpec.class_token`; None: it has none."""


@dataclass(frozen=True, slots=True)
class MergeSpec:
    """Each square of patches becomes one vector: its patches side by side, or `factor` times their mean."""

    mean: bool = False
    factor: float = 1.0
    bias: str | None = None
    """Complete name of a vector that is then subtracted; None: none."""
    scale: str | None = None
    """Complete name of a vector of factors that come last; None: none."""


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """A linear map of a tower's connector."""

    name: str
    """Complete name in the checkpoint, without `.weight`."""
    in_size: int
    out_size: int
    bias: bool = False
    activation: HeadActivation | None = None
    """Of its result."""
    layout: Literal["usual", "by_channel", "transposed"] = "usual"
    """How the checkpoint orders the matrix: `by_channel` has the merged patches of each channel side by side;
    `transposed` is [in, out], and its name has no `.weight`."""


@dataclass(frozen=True, slots=True)
class RootMeanSpec:
    """An RMS norm without a weight."""

    size: int
    eps: float


ConnectorPart = NormSpec | RootMeanSpec | MergeSpec | ProjectionSpec


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision tower, which turns a picture into features: vectors in place of the embeddings of image tokens.

        patches -> linear map + positions -> norm -> layers, each patch sees all -> norm -> connector -> features

    Patches are computed in squares of `merge` rows and columns. A tap is a connector on the output of a layer; its
    features are added to the text model's stream at the image's tokens, after the first, second ... layer (DeepStack;
    Meng et al., 2024, arXiv:2406.04334).
    """

    hidden_size: int
    patch: PatchSpec
    merge: int
    """Patches of a feature along each axis."""
    layers: tuple[LayerSpec, ...]
    connector: tuple[ConnectorPart, ...]
    positions: PatchPositions | None = None
    class_token: str | None = None
    """Complete name of a vector that takes part in the layers after the last patch, without a place; it yields no
    feature. None: there is none."""
    layer_scales: tuple[str, str] | None = None
    """Names, within a layer, of the factors on each element of the outputs of attention and of the feed-forward part;
    None: there are none."""
    rope: RopeConfig | None = None
    """Rotary embedding of the layers; its angles are those of two axes."""
    first_place: int = 0
    """Number of the first row and of the first column in rotary angles."""
    alternating: bool = False
    """Whether even frequencies rotate by the row and odd ones by the column; else half of them by each, the frequencies
    of the half beginning anew."""
    columns_first: bool = False
    """Whether the first half rotates by the column."""
    by_halves: bool = False
    """Whether the checkpoint's heads rotate each half within itself, the first by one axis, the second by the other.
    Rows of queries and keys are reordered on loading."""
    from_minus_one: bool = False
    """Whether the tower takes pixels from -1 to 1, though its processor makes them from 0 to 1."""
    first_norm: NormSpec | None = None
    last_norm: NormSpec | None = None
    taps: tuple[tuple[int, tuple[ConnectorPart, ...]], ...] = ()
    """Index of a layer, with the connector on its output."""
    window: int | None = None
    """Side, in patches, of the windows within which patches see each other; None: all do."""
    whole_layers: tuple[int, ...] = ()
    """Indices of the layers without windows."""
    side: int | None = None
    """Height and width of all pictures, in pixels; None: they differ."""
    stand_in: int | None = None
    """The token whose per-layer embedding an image's tokens have; None: their own."""


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution of width 3 over frames, with a bias and GELU, padded by a frame of zeros on each side."""

    name: str
    in_size: int
    out_size: int
    stride: int


@dataclass(frozen=True, slots=True)
class AudioTowerSpec:
    """An audio tower, to whose output all tokens of the text model attend.

    log-mel frames -> convolutions + positions -> layers, each position sees all -> norm -> keys and values per layer
    """

    num_mels: int
    num_positions: int
    """Of a window, after the convolutions."""
    hidden_size: int
    convolutions: tuple[ConvolutionSpec, ...]
    positions: str
    """Complete name of the vectors that are added to positions."""
    layers: tuple[LayerSpec, ...]
    last_norm: NormSpec
    readers: tuple[tuple[str, CrossAttentionSpec], ...]
    """The text model's layers that attend to it, with their names."""

    @property
    def num_frames(self) -> int:
        """Log-mel frames of a window."""
        return self.num_positions * math.prod(convolution.stride for convolution in self.convolutions)


@dataclass(frozen=True, slots=True)
class SpectrogramSpec:
    """Three convolutions over mels and frames together, each of width 3 and stride 2 with a bias and GELU; then a
    linear map of each frame's channels. They see one chunk at a time, which zeros fill.
    """

    convolutions: tuple[str, str, str]
    channels: int
    """Of each convolution."""
    output: str
    chunk: int
    """Frames that are convolved at a time."""

    @staticmethod
    def reduced(size: int) -> int:
        """Size of an axis after the convolutions."""
        return -(-size // 8)


@dataclass(frozen=True, slots=True)
class AudioEncoderSpec:
    """An audio encoder, which turns a sound into features: vectors in place of the embeddings of its tokens.

    log-mel frames -> convolutions + positions -> layers, each position sees all -> connector -> features
    """

    num_mels: int
    num_positions: int
    """Of the longest stretch of a sound that is encoded at a time, after the convolutions."""
    hidden_size: int
    convolutions: tuple[ConvolutionSpec, ...]
    layers: tuple[LayerSpec, ...]
    group: int
    """Neighbouring positions that `connector` merges into one; positions at the end that make no group are left out."""
    connector: tuple[ConnectorPart, ...]
    positions: str | None = None
    """Complete name of the vectors that are added to positions; None: they are sinusoids."""
    window: int | None = None
    """Positions that see each other: the convolutions end there, and places are counted anew; None: all do."""
    margin: int = 0
    """Frames after the sound that the convolutions see, but that have no positions."""
    spectrogram: SpectrogramSpec | None = None
    """Other convolutions, in place of `convolutions`; places are then counted anew with each chunk. None: there are
    none."""

    @property
    def stride(self) -> int:
        """Fewest frames of a position."""
        if self.spectrogram is not None:
            return self.spectrogram.chunk // self.num_places
        return math.prod(convolution.stride for convolution in self.convolutions)

    @property
    def num_places(self) -> int:
        """Distinct vectors that are added to positions."""
        if self.spectrogram is not None:
            return self.spectrogram.reduced(self.spectrogram.chunk)
        return self.window or self.num_positions

    def positions_of(self, num_frames: int) -> int:
        """Number of positions of so many frames, the margin included."""
        if self.spectrogram is not None:
            chunks, rest = divmod(num_frames, self.spectrogram.chunk)
            return chunks * self.num_places + self.spectrogram.reduced(rest)
        return -(-(num_frames - self.margin) // self.stride)


MediaEncoderSpec = TowerSpec | AudioEncoderSpec | AudioTowerSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder (embedding, layers, final norm, output projection), or an encoder."""

    dtype: DType
    """The checkpoint's dtype."""
    vocab_size: int
    hidden_size: int
    max_position: int
    """Context length in tokens."""
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on the output of each sub-layer before it is added to the residual stream."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """Logits become soft_cap * tanh(logit / soft_cap)."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    per_layer: PerLayerEmbeddingSpec | None = None
    """The per-layer embeddings, if the model has them."""
    mtp: MTPSpec | None = None
    """The multi-token prediction head, if the checkpoint has one; loaded for speculation only."""
    names: ModelNames = field(default_factory=ModelNames)
    quantization: StoredScheme | None = None
    """The storage format of the layers' matrices; None: floating point."""
    encoder: EncoderSpec | None = None
    """An encoder's embedding tables, pooling and head; None: the model generates text."""
    positions: TableSpec | None = None
    """The decoder's table of learned positions; None: it has none."""
    position_bias: PositionBiasSpec | AlibiSpec | None = None
    """Bias on the scores of all layers' attention; None: there is none."""
    embedding_norm: NormSpec | None = None
    """Norm of a decoder's token embeddings; None: there is none."""
    tower: TowerSpec | None = None
    """The vision tower, if Penstock knows the checkpoint's."""
    audio: AudioTowerSpec | None = None
    """The audio tower of a model that transcribes."""
    audio_encoder: AudioEncoderSpec | None = None
    """The audio encoder of a model that takes sounds in prompts, if Penstock knows the checkpoint's."""
    limit: str = "the model's own"
    """What sets `max_position`, for messages."""

    @property
    def encoders(self) -> dict[MediaKind, MediaEncoderSpec]:
        """The encoder of each kind of media that Penstock knows of the checkpoint."""
        found: dict[MediaKind, MediaEncoderSpec | None] = {
            "image": self.tower,
            "sound": self.audio or self.audio_encoder,
        }
        return {kind: encoder for kind, encoder in found.items() if encoder is not None}

    def shard(self, tp_size: int) -> "ModelSpec":
        """The spec of one rank's shard of the layers, which determines its caches and working memory.

        Raises:
            ConfigError: the model cannot be divided among so many ranks.
        """
        check_divides(tp_size, math.gcd(*(part.tp_divisor for layer in self.layers for part in layer.parts)))
        return replace(self, layers=tuple(layer.shard(tp_size) for layer in self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.mixers if mixer.rope is not None))

    @property
    def temperatures(self) -> tuple[TemperatureConfig, ...]:
        """The distinct query scalings of the layers."""
        scaled = (mixer for mixer in self.mixers if isinstance(mixer, (AttentionSpec, LatentAttentionSpec)))
        found = (mixer.temperature for mixer in scaled)
        return tuple(dict.fromkeys(temperature for temperature in found if temperature is not None))

    @property
    def mixers(self) -> Iterator[MixerSpec]:
        """The mixers of the layers; layers without one are skipped."""
        return (layer.mixer.part for layer in self.layers if layer.mixer is not None)

    def format_of(self, name: str) -> WeightFormat:
        """The storage format of the matrix with this complete name."""
        return FLOAT if self.quantization is None else self.quantization.format_of(name)
