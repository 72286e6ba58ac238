"""Builds a `tokenizers` tokenizer of a SentencePiece unigram model (Kudo 2018)."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.checkpoint.gguf.charsmap import check_charsmap
from penstock.checkpoint.gguf.vocabulary import NORMAL, USER_DEFINED
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError

_UNUSED = 5
_MAX_PIECE = 256
"""Maximum characters of a piece; the longest in use have 64."""


@dataclass(frozen=True, slots=True)
class Spaces:
    """How a model normalizes a text, and treats spaces, which it writes as ▁."""

    charsmap: bytes
    """SentencePiece's normalization rules, compiled; empty: none."""
    prefix: bool
    """Whether a space is put before each text."""
    single: bool
    """Whether spaces at its ends, and all but one of adjacent ones, are removed."""
    byte_fallback: bool

    def normalizer(self, *, prefix: bool) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.single:
            steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
        steps += [normalizers.Prepend("▁")] if prefix else []
        return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def unigram_backend(
    file: Path,
    texts: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    unknown: int | None,
    spaces: Spaces,
) -> Tokenizer:
    """A tokenizer that chooses the pieces with the highest sum of scores.

    Args:
        texts: the pieces by token id, like scores and kinds.
        unknown: the id for unknown characters.

    Raises:
        CheckpointError: the model is damaged.
    """
    _check(file, texts, scores, spaces)
    try:
        backend = Tokenizer(models.Unigram(_pieces(texts, scores, kinds), unknown, spaces.byte_fallback))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} holds a vocabulary that cannot be used: {error}") from error
    backend.normalizer = spaces.normalizer(prefix=spaces.prefix)
    strip = [decoders.Strip(content=" ", left=1)] if spaces.prefix else []
    of_bytes = [decoders.ByteFallback()] if spaces.byte_fallback else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *of_bytes, decoders.Fuse(), *strip])
    if spaces.byte_fallback:  # the text <0x41> is no byte
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=<)(?=0x[0-9A-F]{2}>)"), "isolated")
    backend.add_tokens([AddedToken(text, normalized=False) for text in _kept_whole(texts, kinds, spaces)])
    return backend


def _check(file: Path, texts: Sequence[str], scores: Sequence[float], spaces: Spaces) -> None:
    wrong = []
    if not texts:
        wrong.append("it has no pieces")
    if len(set(texts)) < len(texts):
        wrong.append(f"several of its {len(texts)} pieces are equal")
    if any(score != score for score in scores):
        wrong.append("a score is NaN")
    if max(map(len, texts), default=0) > _MAX_PIECE:
        wrong.append(f"a piece has more than {_MAX_PIECE} characters")
    if spaces.charsmap:
        try:
            check_charsmap(spaces.charsmap)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(f"{file} cannot be converted: {'; '.join(wrong)}")


def _pieces(texts: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, float]]:
    """Texts and scores by id. Pieces that SentencePiece never chooses have the least score, or a text that no input
    has: the score of unknown characters depends on the least one.
    """
    normal = [score for score, kind in zip(scores, kinds, strict=True) if kind == NORMAL] or [0.0]
    least, most = min(normal), max(normal)
    found: list[tuple[str, float]] = []
    for text, score, kind in zip(texts, scores, kinds, strict=True):
        if kind == USER_DEFINED:
            found.append((text, len(text) * most - 0.1))  # as SentencePiece does, so that it is chosen
        else:
            found.append((f"{text}\0" if kind == _UNUSED else text, score if kind == NORMAL else least))
    return found


def _kept_whole(texts: Sequence[str], kinds: Sequence[int], spaces: Spaces) -> list[str]:
    """User-defined pieces that the normalizer would change, and so must be cut out of a text before."""
    normalize = spaces.normalizer(prefix=False).normalize_str
    defined = (text for text, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED)
    return [text for text in defined if normalize(text) != text]
