"""A tokenizer as the grammar library takes it: the bytes of each token, and which of them are no text."""

from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

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
        self.library = LLTokenizer(TokenizerWrapper(_Pieces(tokenizer, size)), n_vocab=size + 1, eos_token=size)

    @classmethod
    def of_checkpoint(cls, path: str | Path, size: int) -> "Vocabulary":
        """The vocabulary of the checkpoint in a folder; it may take a second.

        Raises:
            CheckpointError: there is no tokenizer, or it is damaged.
        """
        return cls(Tokenizer.from_path(path), size)


class _Pieces:
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
