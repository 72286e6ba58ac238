"""What an encoder has beside its layers, as plain data: tables of positions and token types, pooling, a head. No torch.

token ids -> word + position + token type -> norm -> layers -> pooling -> head -> a vector
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.encoder_config import HeadActivation, Pooling
from penstock.layers.spec import MatrixSize, NormSpec


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Learned vectors that are added to those of the tokens."""

    name: str
    """In the checkpoint, without `.weight`."""
    rows: int
    offset: int = 0
    """The row that stands for the first position."""


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear map of pooled vectors, and what follows it."""

    name: str
    """In the checkpoint, without `.weight`."""
    in_size: int
    out_size: int
    bias: bool
    activation: HeadActivation | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a language model that was asked yes or no: the logit of one token, less that of another."""

    true_token: int
    false_token: int | None
    output: str | None
    """The projection to the vocabulary, without `.weight`; None: the embedding is that, too."""


HeadPart = DenseSpec | NormSpec | Verdict


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder's ends. Several ways of pooling give their vectors one after another."""

    hidden_size: int
    positions: TableSpec | None = None
    token_types: TableSpec | None = None
    """Of a pair's texts, the first or the second."""
    norm: NormSpec | None = None
    """Of the sum of all embeddings."""
    pooling: tuple[Pooling, ...] = ("mean",)
    head: tuple[HeadPart, ...] = ()

    @property
    def tables(self) -> Iterator[TableSpec]:
        """Those that there are."""
        yield from (table for table in (self.positions, self.token_types) if table is not None)

    @property
    def vector_size(self) -> int:
        """Numbers that a text becomes."""
        size = self.hidden_size * len(self.pooling)
        for part in self.head:
            size = part.out_size if isinstance(part, DenseSpec) else 1 if isinstance(part, Verdict) else size
        return size

    @property
    def num_other_parameters(self) -> int:
        """Elements of its weights that are not in `matrices`."""
        norms = [part for part in (self.norm, *self.head) if isinstance(part, NormSpec)]
        biases = sum(part.out_size for part in self.head if isinstance(part, DenseSpec) and part.bias)
        tables = sum(table.rows * self.hidden_size for table in self.tables)
        return tables + biases + sum(norm.num_parameters for norm in norms)

    def matrices(self) -> Iterator[MatrixSize]:
        """The head's."""
        for part in self.head:
            if isinstance(part, DenseSpec):
                yield MatrixSize(part.name, part.out_size, part.in_size)
