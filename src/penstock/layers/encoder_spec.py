"""The spec of an encoder's embedding tables, pooling and head; `models/encoder.py` computes them.

token ids -> word + position + token type -> norm -> layers -> pooling -> head -> a vector
"""

from dataclasses import dataclass

from penstock.checkpoint.encoder_config import HeadActivation, Pooling
from penstock.layers.spec import NormSpec


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of learned vectors that are added to the token embeddings."""

    name: str
    """In the checkpoint, without `.weight`."""
    rows: int
    padding: int | None = None
    """A token that has no position and takes the row of its id; positions begin with the row after it. None: row 0."""


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer on pooled vectors, with an optional activation."""

    name: str
    """In the checkpoint, without `.weight`."""
    in_size: int
    out_size: int
    bias: bool
    activation: HeadActivation | None = None


@dataclass(frozen=True, slots=True)
class TokenScoreHead:
    """A language model's answer to a yes-or-no question: the logit of one token minus that of another."""

    true_token: int
    false_token: int | None
    output: str | None
    """Name of the output projection, without `.weight`; None: it is tied to the embedding."""


HeadPart = DenseSpec | NormSpec | TokenScoreHead


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What an encoder has before and after its layers. The vectors of several pooling modes are concatenated."""

    hidden_size: int
    positions: TableSpec | None = None
    token_types: TableSpec | None = None
    """Segment embeddings: whether a token belongs to the first or the second text of a pair."""
    norm: NormSpec | None = None
    """Norm of the sum of all embeddings."""
    pooling: tuple[Pooling, ...] = ("mean",)
    padding: int | None = None
    """A token at which no text ends: texts are pooled without those at their end. None: there is none."""
    head: tuple[HeadPart, ...] = ()

    @property
    def vector_size(self) -> int:
        """Size of a text's vector."""
        size = self.hidden_size * len(self.pooling)
        for part in self.head:
            size = part.out_size if isinstance(part, DenseSpec) else 1 if isinstance(part, TokenScoreHead) else size
        return size
