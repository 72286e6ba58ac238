"""The tokenizer in llguidance's form: the bytes of each token, and the special tokens."""

import bisect
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from penstock.text.tokenizer import Tokenizer


class Vocabulary:
    """The text of each token id, as grammars use it.

    An additional id, after the model's, stands for the end of the answer and is allowed where a grammar is complete;
    each request has its own stop tokens. A special token is allowed only where a grammar names it, an id without text
    never.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """
        Args:
            size: number of ids that the model samples from, which may exceed the tokenizer's.
        """
        self.size = size  # also the id of the end
        self._wrapped = _Wrapped(tokenizer, size)
        self.library = LLTokenizer(TokenizerWrapper(self._wrapped), n_vocab=size + 1, eos_token=size)

    @classmethod
    def of_checkpoint(cls, path: str | Path, size: int) -> "Vocabulary":
        """Load the vocabulary of the checkpoint in a folder, which may take a second.

        Raises:
            CheckpointError: there is no tokenizer, or it is damaged.
        """
        return cls(Tokenizer.from_path(path), size)

    @functools.cached_property
    def pieces(self) -> "Pieces":
        """The tokens' texts, computed on first use in a fraction of a second."""
        special = set(self._wrapped.special_token_ids)
        return Pieces([b"" if token in special else text for token, text in enumerate(self._wrapped.tokens)])


class Pieces:
    """The texts of the tokens, with indexes of those that contain quotes or end values."""

    def __init__(self, texts: list[bytes]) -> None:
        """
        Args:
            texts: the text of each token; empty for those without one.
        """
        self.texts = texts
        self._order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._order]
        self.with_two_quotes = self._tokens(lambda text: text.count(b'"') > 1)
        self.past_quotes = self._tokens(lambda text: b'"' in text[:-1])
        """Tokens that continue after a quote."""
        self.past_scalars = self._tokens(lambda text: b"," in (start := text.partition(b'"')[0]) or b"]" in start)
        """Tokens that may end a number, true, false or null in a list."""
        self.ending = np.zeros((len(texts) + 31) // 32, dtype=np.uint32)
        """Bitmask of the tokens that begin with a quote, and so end a string."""
        for token in self._tokens(lambda text: text.startswith(b'"')).tolist():
            self.ending[token >> 5] |= np.uint32(1 << (token & 31))

    def _tokens(self, choose: Callable[[bytes], bool]) -> NDArray[np.int64]:
        return np.array([token for token, text in enumerate(self.texts) if choose(text)], dtype=np.int64)

    def beginning_with(self, text: bytes) -> list[int]:
        """The tokens whose text begins with a prefix."""
        first = last = bisect.bisect_left(self._sorted, text)
        while last < len(self._sorted) and self._sorted[last].startswith(text):
            last += 1
        return self._order[first:last]

    def equal_to(self, text: bytes) -> NDArray[np.int64]:
        """The tokens whose text equals `text`."""
        first, last = bisect.bisect_left(self._sorted, text), bisect.bisect_right(self._sorted, text)
        return np.array(self._order[first:last], dtype=np.int64)


class _Wrapped:
    """The interface that llguidance's `TokenizerWrapper` expects."""

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
