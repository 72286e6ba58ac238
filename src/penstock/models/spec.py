"""The spec of a model: a list of layers. Plain data, no torch. Each family turns its `config.json` into a `ModelSpec`.

A layer has a mixer, which combines tokens (such as attention), and a feed-forward part. Each takes the normalized
residual stream, and its output is added to the stream. `penstock.layers` has the kinds of parts, each with its spec.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from penstock.config.model_facts import DType, LayerFacts, Matrix
from penstock.config.ranks import check_divides
from penstock.config.weight_formats import FLOAT
from penstock.layers.attention_spec import AttentionSpec
from penstock.layers.encoder_spec import EncoderSpec
from penstock.layers.per_layer_spec import PerLayerEmbeddingSpec
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import FeedForwardSpec, MatrixSize, MixerSpec, NormSpec, PartSpec, PerLayerInputSpec
from penstock.quantization.scheme import StoredScheme

PartT = TypeVar("PartT", MixerSpec, FeedForwardSpec, PerLayerInputSpec)


@dataclass(frozen=True, slots=True)
class Branch(Generic[PartT]):
    """A part of a layer and its norms: `norm_after(part(norm(stream)))` is added to the residual stream.

    With `norm_of_sum` (post-norm), the stream then becomes the norm of the sum.
    """

    part: PartT
    norm: NormSpec | None
    norm_after: NormSpec | None = None
    norm_of_sum: NormSpec | None = None

    @property
    def norms(self) -> Iterator[NormSpec]:
        """The norms that the branch has."""
        yield from (norm for norm in (self.norm, self.norm_after, self.norm_of_sum) if norm is not None)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: a mixer, a feed-forward part, or both; in some models also a per-layer input."""

    name: str
    """Prefix of its tensor names, such as `model.layers.3`."""
    mixer: Branch[MixerSpec] | None
    feed_forward: Branch[FeedForwardSpec] | None
    per_layer: Branch[PerLayerInputSpec] | None = None
    """The part that applies the layer's columns of `ModelSpec.per_layer`."""
    scale: str | None = None
    """Name, within the layer, of the scalar that the residual stream is multiplied by at the end of the layer."""

    @property
    def parts(self) -> Iterator[PartSpec]:
        """The parts that the layer has."""
        if self.mixer is not None:
            yield self.mixer.part
        if self.feed_forward is not None:
            yield self.feed_forward.part
        if self.per_layer is not None:
            yield self.per_layer.part

    def share(self, ranks: int) -> "LayerSpec":
        """The spec of one rank's shard of the layer."""
        mixer, feed_forward, per_layer = self.mixer, self.feed_forward, self.per_layer
        if mixer is not None:
            mixer = replace(mixer, part=mixer.part.share(ranks))
        if feed_forward is not None:
            feed_forward = replace(feed_forward, part=feed_forward.part.share(ranks))
        if per_layer is not None:
            per_layer = replace(per_layer, part=per_layer.part.share(ranks))
        return replace(self, mixer=mixer, feed_forward=feed_forward, per_layer=per_layer)

    @property
    def facts(self) -> LayerFacts:
        """The layer's properties for the memory plan."""
        cache = None if self.mixer is None else self.mixer.part.cache
        return LayerFacts(cache, tuple(part.working for part in self.parts))

    @property
    def num_other_parameters(self) -> int:
        """Number of weight elements that are not in matrices."""
        branches = (branch for branch in (self.mixer, self.feed_forward, self.per_layer) if branch is not None)
        norms = sum(norm.num_parameters for branch in branches for norm in branch.norms)
        return norms + sum(part.num_other_parameters for part in self.parts) + (self.scale is not None)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """A family's weight names outside the layers, without `.weight`. The defaults are Llama's."""

    embedding: str = "model.embed_tokens"
    output: str = "lm_head"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of full tensor names that are not loaded from the checkpoint."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Replacements of name prefixes, (in the checkpoint, here); the first one that matches is applied."""


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

    def matrices(self, hidden_size: int) -> Iterator[MatrixSize]:
        """The head's matrices, with complete names."""
        yield MatrixSize(self.projection, hidden_size, 2 * hidden_size)
        for part in self.layer.parts:
            for name, rows, columns in part.matrices():
                yield MatrixSize(f"{self.layer.name}.{name}", rows, columns)

    @property
    def num_other_parameters(self) -> int:
        """Number of weight elements that are not in matrices."""
        norms = (self.embedding_norm, self.hidden_norm, self.norm)
        return self.layer.num_other_parameters + sum(norm.num_parameters for norm in norms)


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
    """Factor on the output of each branch before it is added to the residual stream."""
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
    ranks: int = 1
    """Number of ranks among which the embedding and the output projection are sharded by rows."""

    def share(self, ranks: int) -> "ModelSpec":
        """The spec of one rank's shard of the model.

        Raises:
            ConfigError: the model cannot be divided among so many ranks.
        """
        check_divides(ranks, math.gcd(*(part.divided_by for layer in self.layers for part in layer.parts)))
        return replace(self, layers=tuple(layer.share(ranks) for layer in self.layers), ranks=ranks)

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
        found = (mixer.temperature for mixer in self.mixers if isinstance(mixer, AttentionSpec))
        return tuple(dict.fromkeys(temperature for temperature in found if temperature is not None))

    @property
    def mixers(self) -> Iterator[MixerSpec]:
        """The mixers of the layers; layers without one are skipped."""
        return (layer.mixer.part for layer in self.layers if layer.mixer is not None)

    def matrices(self) -> list[Matrix]:
        """All matrices: the layers', the output projection unless it is tied, and the embedding."""
        found = [
            self.matrix(f"{layer.name}.{name}", rows, columns)
            for layer in self.layers
            for part in layer.parts
            for name, rows, columns in part.matrices()
        ]
        table = (-(-self.vocab_size // self.ranks), self.hidden_size)
        if self.encoder is not None:
            found += [self.matrix(*matrix) for matrix in self.encoder.matrices()]
            return [*found, replace(self.matrix(self.names.embedding, *table), multiplied=False)]
        if not self.tie_embeddings:
            found.append(self.matrix(self.names.output, *table))
        if self.per_layer is not None:
            for matrix in (self.per_layer.projection_matrix, self.per_layer.table):
                rows = -(-matrix.rows // self.ranks)
                found.append(
                    replace(
                        self.matrix(matrix.name, rows, matrix.columns),
                        multiplied=matrix.name == self.per_layer.projection,
                    )
                )
        return [*found, replace(self.matrix(self.names.embedding, *table), multiplied=self.tie_embeddings)]

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The matrix with this complete name, in its storage format."""
        return Matrix(name, rows, columns, self.quantization.format_of(name) if self.quantization else FLOAT)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all weights; a tied embedding counts once."""
        small = sum(layer.num_other_parameters for layer in self.layers) + self.final_norm.num_parameters
        small += 0 if self.encoder is None else self.encoder.num_other_parameters
        small += self.vocab_size * self.output_bias
        small += 0 if self.per_layer is None else self.per_layer.size
        return sum(matrix.rows * matrix.columns for matrix in self.matrices()) + small
