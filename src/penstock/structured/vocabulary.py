"""A tokenizer in the grammar library's form: the bytes of each token, and which tokens are not text."""

import bisect
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from penstock.tokenizer import Tokenizer


class Vocabulary:
    """What each of a model's token ids stands for, for grammars to be built on.

    One id more than the model has stands for the end of the answer: it is allowed where a grammar is complete. Which of
    the model's own tokens end an answer, and whether any does, is a matter of each request. Special tokens are no text:
    a grammar allows one only where it names it. Ids without a text are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """
        Args:
            size: how many ids the model samples from; it may be more than the tokenizer knows.
        """
        self.size = size  # also the id of the end
        self._wrapped = _Wrapped(tokenizer, size)
        self.library = LLTokenizer(TokenizerWrapper(self._wrapped), n_vocab=size + 1, eos_token=size)

    @classmethod
    def of_checkpoint(cls, path: str | Path, size: int) -> "Vocabulary":
        """The vocabulary of the checkpoint in a folder; it may take a second.

        Raises:
            CheckpointError: there is no tokenizer, or it is damaged.
        """
        return cls(Tokenizer.from_path(path), size)

    @functools.cached_property
    def pieces(self) -> "Pieces":
        """What the tokens write; made when it is first asked for, in a fraction of a second."""
        special = set(self._wrapped.special_token_ids)
        return Pieces([b"" if token in special else text for token, text in enumerate(self._wrapped.tokens)])


class Pieces:
    """The texts of a vocabulary's tokens, and which of them hold quotes and ends of values."""

    def __init__(self, texts: list[bytes]) -> None:
        """
        Args:
            texts: of each token; none of one that is no text.
        """
        self.texts = texts
        self._order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._order]
        self.with_two_quotes = self._tokens(lambda text: text.count(b'"') > 1)
        self.past_quotes = self._tokens(lambda text: b'"' in text[:-1])
        """Tokens that continue after a quote."""
        self.past_scalars = self._tokens(lambda text: b"," in (start := text.partition(b'"')[0]) or b"]" in start)
        """Those that may end a number, true, false or null in a list."""
        self.ending = np.zeros((len(texts) + 31) // 32, dtype=np.uint32)
        """A bit for each token that begins with a quote: one that ends a string."""
        for token in self._tokens(lambda text: text.startswith(b'"')).tolist():
            self.ending[token >> 5] |= np.uint32(1 << (token & 31))

    def _tokens(self, choose: Callable[[bytes], bool]) -> NDArray[np.int64]:
        return np.array([token for token, text in enumerate(self.texts) if choose(text)], dtype=np.int64)

    def beginning_with(self, text: bytes) -> list[int]:
        """Tokens whose text begins with a prefix."""
        first = last = bisect.bisect_left(self._sorted, text)
        while last < len(self._sorted) and self._sorted[last].startswith(text):
            last += 1
        return self._order[first:last]

    def equal_to(self, text: bytes) -> NDArray[np.int64]:
        """The tokens that are a text."""
        first, last = bisect.bisect_left(self._sorted, text), bisect.bisect_right(self._sorted, text)
        return np.array(self._order[first:last], dtype=np.int64)


class _Wrapped:
    """What `TokenizerWrapper` reads."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        ids = range(size)
        self.eos_token_id = size
        self.tokens = [tokenizer.token_bytes(token) for token in ids] + [b"<|end of answer|>"]
        self.special_token_ids = [token for token in ids if self.tokens[token] and not tokenizer.is_shown(token)]
        self.special_token_ids.append(size)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
