"""A model as a list of layers: plain data, no torch. Each family turns its `config.json` into a `ModelSpec`.

A layer is a mixer, in which tokens see others, and a feed-forward part; each takes a norm of the residual stream, and
what it gives is added to that. `penstock.layers` has the kinds of parts, each with its spec.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from penstock.layers.attention_spec import AttentionSpec
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import FeedForwardSpec, MixerSpec, NormSpec, PartSpec
from penstock.memory import DType, LayerFacts, Matrix
from penstock.quantization.scheme import StoredScheme
from penstock.ranks import check_divides
from penstock.weight_formats import FLOAT

PartT = TypeVar("PartT", MixerSpec, FeedForwardSpec)


@dataclass(frozen=True, slots=True)
class Branch(Generic[PartT]):
    """A part of a layer and its norms: `norm_after(part(norm(stream)))` is added to the residual stream."""

    part: PartT
    norm: NormSpec | None
    norm_after: NormSpec | None = None

    @property
    def norms(self) -> Iterator[NormSpec]:
        """Those that there are."""
        yield from (norm for norm in (self.norm, self.norm_after) if norm is not None)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer, then a feed-forward part, of which one may be missing."""

    name: str
    """What the names of its tensors begin with, as `model.layers.3`."""
    mixer: Branch[MixerSpec] | None
    feed_forward: Branch[FeedForwardSpec] | None

    @property
    def parts(self) -> Iterator[PartSpec]:
        """Those that there are."""
        if self.mixer is not None:
            yield self.mixer.part
        if self.feed_forward is not None:
            yield self.feed_forward.part

    def share(self, ranks: int) -> "LayerSpec":
        """The layer as one of so many ranks computes it."""
        mixer, feed_forward = self.mixer, self.feed_forward
        if mixer is not None:
            mixer = replace(mixer, part=mixer.part.share(ranks))
        if feed_forward is not None:
            feed_forward = replace(feed_forward, part=feed_forward.part.share(ranks))
        return replace(self, mixer=mixer, feed_forward=feed_forward)

    @property
    def facts(self) -> LayerFacts:
        """What the memory plan needs to know."""
        cache = None if self.mixer is None else self.mixer.part.cache
        return LayerFacts(cache, tuple(part.working for part in self.parts))

    @property
    def num_other_parameters(self) -> int:
        """Elements of the weights that are not matrices."""
        branches = (branch for branch in (self.mixer, self.feed_forward) if branch is not None)
        norms = sum(norm.size for branch in branches for norm in branch.norms)
        return norms + sum(part.num_other_parameters for part in self.parts)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """A family's names beside those of the layers, without `.weight`. The defaults are Llama's."""

    embedding: str = "model.embed_tokens"
    output: str = "lm_head"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of full tensor names that a checkpoint may hold and we compute ourselves, or not at all."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """What names in the checkpoint may begin with, and what they begin with here: the first that fits is replaced."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: an embedding, layers, a last norm and the projection to the vocabulary."""

    dtype: DType
    """The checkpoint's own."""
    vocab_size: int
    hidden_size: int
    max_position: int
    """Tokens of the longest text it was made for."""
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """On what each branch adds to the residual stream."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """Logits become soft_cap * tanh(logit / soft_cap)."""
    names: ModelNames = field(default_factory=ModelNames)
    quantization: StoredScheme | None = None
    """How the layers' matrices are stored; None: as floating point."""

    def share(self, ranks: int) -> "ModelSpec":
        """The model as one of so many ranks computes it, but for the vocabulary.

        Raises:
            ConfigError: they cannot divide it.
        """
        check_divides(ranks, math.gcd(*(part.divided_by for layer in self.layers for part in layer.parts)))
        return replace(self, layers=tuple(layer.share(ranks) for layer in self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of the layers, each once."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self._mixers if mixer.rope is not None))

    @property
    def temperatures(self) -> tuple[TemperatureConfig, ...]:
        """What queries of the layers are multiplied by, each once."""
        found = (mixer.temperature for mixer in self._mixers if isinstance(mixer, AttentionSpec))
        return tuple(dict.fromkeys(temperature for temperature in found if temperature is not None))

    @property
    def _mixers(self) -> Iterator[MixerSpec]:
        return (layer.mixer.part for layer in self.layers if layer.mixer is not None)

    def matrices(self) -> list[Matrix]:
        """The layers' matrices, then the embedding and, if it is not the same, the output projection."""
        found = [
            self._matrix(f"{layer.name}.{name}", rows, columns)
            for layer in self.layers
            for part in layer.parts
            for name, rows, columns in part.matrices()
        ]
        table = (self.vocab_size, self.hidden_size)
        if not self.tie_embeddings:
            found.append(self._matrix(self.names.output, *table))
        return [*found, replace(self._matrix(self.names.embedding, *table), multiplied=self.tie_embeddings)]

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return Matrix(name, rows, columns, self.quantization.format_of(name) if self.quantization else FLOAT)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied embedding counts once."""
        small = sum(layer.num_other_parameters for layer in self.layers) + self.final_norm.size
        return sum(matrix.rows * matrix.columns for matrix in self.matrices()) + small
