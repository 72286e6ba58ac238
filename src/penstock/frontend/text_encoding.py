"""Text encoding for embedding models and rerankers: tokenisation, and vectors and scores from the outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from penstock.api.request import RequestOutput
from penstock.checkpoint.encoder_config import EncoderConfig, Task
from penstock.dataclass import dataclass
from penstock.engine.info import EngineInfo
from penstock.errors import InvalidRequestError, PromptTooLongError, WrongTaskError
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Side = Literal["left", "right"]

_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruct}\n'
    "<Query>: {query}\n<Document>: "
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's instruction from its model card, for folders without a template for query and document."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text or a pair."""

    token_ids: tuple[int, ...]
    second_text: int = 0
    """Index of the first token of token type 1; 0: none."""


class TextEncoder:
    """Tokenises texts and pairs for one model."""

    def __init__(self, tokenizer: Tokenizer | None, info: EngineInfo) -> None:
        self._tokenizer, self._info = tokenizer, info

    @property
    def config(self) -> EncoderConfig:
        """
        Raises:
            WrongTaskError: the model is generative.
        """
        if self._info.encoder is None:
            raise WrongTaskError(
                f"{self._info.model_name} generates text; it has no embeddings and no scores, which an embedding model "
                "or a reranker has",
                "model",
                over_http="ask /v1/chat/completions or /v1/completions",
            )
        return self._info.encoder

    def check_task(self, task: Task) -> None:
        """
        Raises:
            WrongTaskError: the model is for another task.
        """
        if self.config.task != task:
            name, scores = self._info.model_name, "ask /v1/rerank or /v1/score"
            if task == "embed":
                raise WrongTaskError(f"{name} scores pairs of texts; it has no embeddings", "model", over_http=scores)
            raise WrongTaskError(f"{name} embeds texts; it is no reranker", "model", over_http="ask /v1/embeddings")

    def prompt(self, name: str | None) -> str:
        """The prefix of a text: the named prompt, or the folder's default.

        Raises:
            InvalidRequestError: there is no prompt of this name.
        """
        config = self.config
        if name is None:
            return config.prompts.get(config.default_prompt or "", "")
        if name not in config.prompts:
            known = ", ".join(config.prompts) or "none"
            raise InvalidRequestError(f"the model has no prompt {name!r}; it has: {known}", "prompt_name")
        return config.prompts[name]

    def named_prompt(self, *names: str) -> str:
        """The first of these prompts that the model has, else its default prompt."""
        known = [name for name in names if name in self.config.prompts]
        return self.prompt(known[0] if known else None)

    def encode(
        self, texts: Sequence[str], *, prompt: str = "", truncate: Side | None = None, param: str = "input"
    ) -> list[EncodedText]:
        """Token ids of texts, including special tokens.

        Args:
            truncate: the side at which texts that are too long are truncated; None: they are refused.
            param: the request field of the texts, for errors.

        Raises:
            PromptTooLongError: a text has more tokens than the model accepts.
        """
        for text in texts:
            if not isinstance(text, str) or not (prompt or text):
                raise InvalidRequestError(f"{param} must hold texts of at least one character, not {text!r}", param)
        return self._encode_all([self._cased(prompt + text) for text in texts], truncate, param)

    def _encode_all(
        self, texts: "Sequence[str | tuple[str, str]]", truncate: Side | None, param: str
    ) -> list[EncodedText]:
        most = None if truncate is None else self._info.max_model_len
        encoded = self._need_tokenizer().encode_texts(texts, most, truncate or "right")
        typed = self.config.token_types
        return [self._within((ids, second if typed else 0), param) for ids, second in encoded]

    def check_tokens(
        self, token_ids: Sequence[int], *, truncate: Side | None = None, param: str = "input"
    ) -> EncodedText:
        """Validate token ids given by the caller."""
        vocab, most = self._info.vocab_size, self._info.max_model_len
        if not token_ids:
            raise InvalidRequestError(f"{param} is empty: it must have at least one token", param)
        for token in token_ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise InvalidRequestError(f"{param} holds {token!r}: token ids go from 0 to {vocab - 1}", param)
        if truncate is not None:
            token_ids = token_ids[:most] if truncate == "right" else token_ids[-most:]
        return self._within((tuple(token_ids), 0), param)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncate: Side | None = None, param: str = "documents"
    ) -> list[EncodedText]:
        """Token ids of query-document pairs, in the format of the reranker. See `encode`."""
        if self.config.is_asked:
            tokenizer = self._need_tokenizer()
            return [
                self._asked(tokenizer, self._question(tokenizer, *pair), pair[1], truncate, param) for pair in pairs
            ]
        prompt = self.prompt(None)
        cased = [(self._cased(prompt + query), self._cased(document)) for query, document in pairs]
        return self._encode_all(cased, truncate, param)

    def _question(self, tokenizer: Tokenizer, query: str, document: str) -> str:
        """The prompt that a language model answers with yes or no."""
        prompt = self.prompt(None)
        source = tokenizer.chat_template_source
        if "query" in source and "document" in source:
            system = [{"role": "system", "content": prompt}] if prompt else []
            pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return tokenizer.apply_chat_template([*system, *pair])
        return _JUDGE.format(instruct=prompt or _INSTRUCT, query=query) + document + _ANSWER

    def _asked(self, tokenizer: Tokenizer, text: str, document: str, truncate: Side | None, param: str) -> EncodedText:
        most = self._info.max_model_len
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if truncate is not None and document and len(token_ids) > most:  # of the document; the question follows it
            head, found, tail = text.rpartition(document)
            ending = tokenizer.encode(tail, add_special_tokens=False)
            begun = tokenizer.encode(head + found, add_special_tokens=False)
            token_ids = begun[: max(0, most - len(ending))] + ending
        return self._within((tuple(token_ids), 0), param)

    def _cased(self, text: str) -> str:
        return text.lower() if self.config.lower_case else text

    def _within(self, encoded: tuple[tuple[int, ...], int], param: str) -> EncodedText:
        token_ids, second = encoded
        most = self._info.max_model_len
        if len(token_ids) > most:
            raise PromptTooLongError(
                f"{param} is too long: {len(token_ids)} tokens, and this model's maximum context length is {most} "
                "tokens; shorten it, or ask for it to be truncated",
                param,
            )
        return EncodedText(token_ids, second)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("the model came without a tokenizer.json: send token ids", "input")
        return self._tokenizer


def check_dimensions(dimensions: int | None, config: EncoderConfig) -> None:
    """
    Raises:
        InvalidRequestError: the model's vectors have fewer dimensions.
    """
    if dimensions is not None and not 1 <= dimensions <= config.vector_size:
        raise InvalidRequestError(
            f"dimensions must be from 1 to {config.vector_size}, the size of the model's vectors, not {dimensions}",
            "dimensions",
        )


def vector_of(
    output: RequestOutput, config: EncoderConfig, *, dimensions: int | None = None, normalize: bool | None = None
) -> "NDArray[np.float32]":
    """A text's vector, [dimensions] float32.

    Args:
        dimensions: number of leading elements to keep; None: as the folder says. A normalized vector is normalized
            again, unless both are as the folder says: `sentence-transformers` does not.
        normalize: whether to normalize to length 1; None: as the folder says.
    """
    import numpy as np

    assert output.vector is not None, "the text was not embedded"
    whole = np.frombuffer(output.vector, np.float32)
    vector = whole[: dimensions or config.truncate_dim]
    if not (config.normalize if normalize is None else normalize):
        return vector
    scaled = whole if dimensions is None and normalize is None else vector
    length = np.sqrt(np.square(scaled, dtype=np.float64).sum())
    return (vector / max(float(length), 1e-12)).astype(np.float32)


def scores_of(output: RequestOutput, config: EncoderConfig, *, raw: bool = False) -> list[float]:
    """The scores of a pair, one per label; a single score goes through a sigmoid unless `raw`."""
    import numpy as np

    assert output.vector is not None, "the pair was not scored"
    logits = np.frombuffer(output.vector, np.float32).astype(np.float64)
    if config.sigmoid and not raw and len(logits) == 1:
        logits = 1.0 / (1.0 + np.exp(-logits))
    return [float(logit) for logit in logits]
