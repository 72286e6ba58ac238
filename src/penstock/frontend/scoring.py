"""Scores of query-document pairs, by a reranker or by the similarity of an embedding model's vectors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.api.request import RequestOutput
from penstock.checkpoint.encoder_config import Similarity
from penstock.errors import InvalidRequestError
from penstock.frontend.text_encoding import EncodedText, Side, TextEncoder, scores_of, vector_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pair = tuple[str, str]
"""A query and a document."""


def paired(queries: str | Sequence[str], documents: str | Sequence[str], param: str = "query") -> list[Pair]:
    """The pairs to score: one query with each document, or equally many of both.

    Raises:
        InvalidRequestError: the numbers of queries and documents do not match.
    """
    firsts = [queries] if isinstance(queries, str) else list(queries)
    seconds = [documents] if isinstance(documents, str) else list(documents)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequestError(
            f"{len(firsts)} queries do not go with {len(seconds)} documents: give one query, or one for each",
            param,
        )
    return list(zip(firsts, seconds, strict=True))


class Scoring:
    """Computes the scores of pairs: the texts to encode, then the scores from their outputs."""

    def __init__(self, encoder: TextEncoder, pairs: Sequence[Pair], truncate: Side | None) -> None:
        """
        Raises:
            InvalidRequestError: a text is refused, or the model is generative.
        """
        self._config = encoder.config
        self._pairs = pairs
        self._index: dict[Pair, int] = {}
        """Index in `encoded` by (field, text), for an embedding model."""
        self.encoded: list[EncodedText] = []
        """Distinct texts to compute."""
        if self._config.task == "score":
            self.encoded = encoder.encode_pairs(pairs, truncate=truncate)
            return
        prompts = {"query": encoder.named_prompt("query"), "documents": encoder.named_prompt("document", "passage")}
        for pair in pairs:
            for field, text in zip(prompts, pair, strict=True):
                if (field, text) not in self._index:
                    self._index[field, text] = len(self.encoded)
                    self.encoded += encoder.encode([text], prompt=prompts[field], truncate=truncate, param=field)

    def scores(self, outputs: Sequence[RequestOutput], *, raw: bool = False) -> list[float]:
        """One score per pair, from the outputs of the `encoded` texts.

        Raises:
            InvalidRequestError: the model has several labels, so there is no single score.
        """
        if self._config.task == "score":
            all_scores = [scores_of(output, self._config, raw=raw) for output in outputs]
            for scores in all_scores:
                if len(scores) != 1:
                    raise InvalidRequestError(f"the model has {len(scores)} labels; a reranker must have one", "model")
            return [scores[0] for scores in all_scores]
        normalize = True if self._config.similarity == "cosine" else None
        vectors = [vector_of(output, self._config, normalize=normalize) for output in outputs]
        firsts = (vectors[self._index["query", query]] for query, _ in self._pairs)
        seconds = (vectors[self._index["documents", document]] for _, document in self._pairs)
        return [
            _similarity(first, second, self._config.similarity) for first, second in zip(firsts, seconds, strict=True)
        ]


def _similarity(first: "NDArray[np.float32]", second: "NDArray[np.float32]", kind: Similarity) -> float:
    """Similarity of two vectors, as in `sentence-transformers`; for cosine they must have length 1."""
    if kind in ("cosine", "dot"):
        return float((first * second).sum(dtype="float64"))
    difference = abs(first.astype("float64") - second)
    return -float(difference.sum() if kind == "manhattan" else (difference**2).sum() ** 0.5)
