"""Builds a `Request` from a prompt and its parameters: tokenises, fills in defaults, validates everything once."""

import functools
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from random import Random, SystemRandom
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.api.request import Adapter, Image, Request
from penstock.api.sampling_params import DEFAULTABLE, NO_ANSWER, Beams, ResolvedParams, SamplingParams
from penstock.dataclass import dataclass
from penstock.engine.info import EngineInfo
from penstock.errors import CheckpointError, InvalidRequestError, PromptTooLongError, WrongTaskError
from penstock.frontend.text_encoding import EncodedText
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.frontend.large_work import LargeWork

T = TypeVar("T")

LONG_TEXT = 4096
"""Texts of this many characters take milliseconds to tokenise, so a thread tokenises them."""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids of a prompt, and the images in it."""

    token_ids: list[int]
    images: tuple[Image, ...] = ()


class PromptEncoder:
    """Tokenises texts and, through the checkpoint's chat template, conversations."""

    def __init__(self, tokenizer: Tokenizer | None, large_work: "LargeWork", text_work: "LargeWork") -> None:
        """
        Args:
            tokenizer: None if the checkpoint has none: every text is then refused.
            large_work: for work in Python.
            text_work: for tokenising, during which the interpreter's lock is free.
        """
        self._tokenizer = tokenizer
        self._large_work = large_work
        self._text_work = text_work

    def need_tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidRequestError: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                "the model came without a tokenizer.json: it takes token ids only", over_http="/v1/completions does"
            )
        return self._tokenizer

    async def encode(self, text: str, tenant: str = "") -> list[int]:
        """Token ids of a text prompt.

        Raises:
            InvalidRequestError: the model has no tokenizer.
        """
        tokenizer = self.need_tokenizer()
        return await self._off_loop_if_long(len(text), lambda: tokenizer.encode(text), tenant)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        prefill: str = "",
        tenant: str = "",
    ) -> list[int]:
        """Token ids of a conversation in the checkpoint's chat template; `prefill` is the beginning of the answer.

        Raises:
            InvalidRequestError: there is no tokenizer or template, or the template refuses the conversation or exceeds
                its time or memory limit.
        """
        tokenizer = self.need_tokenizer()
        text = await self.render_chat(messages, tools, variables, tenant=tenant) + prefill
        return await self._off_loop_if_long(len(text), lambda: tokenizer.encode(text, add_special_tokens=False), tenant)

    async def encode_rendered(self, text: str, tenant: str = "") -> list[int]:
        """Token ids of a rendered conversation, which has its special tokens."""
        tokenizer = self.need_tokenizer()
        return await self._off_loop_if_long(len(text), lambda: tokenizer.encode(text, add_special_tokens=False), tenant)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        tenant: str = "",
    ) -> str:
        """Text of a conversation in the checkpoint's chat template. Raises the same errors as `encode_chat`.

        Args:
            variables: further variables of the template.
        """

        def off_loop(size: int, work: Callable[[], bytes]) -> Awaitable[bytes]:
            return self._large_work.run(size, work, tenant)

        return await self.need_tokenizer().apply_chat_template_from_loop(messages, tools, variables, off_loop)

    async def _off_loop_if_long(self, size: int, work: Callable[[], T], tenant: str) -> T:
        return await self._text_work.run(size, work, tenant) if size >= LONG_TEXT else work()


def check_generates(info: EngineInfo) -> None:
    """
    Raises:
        WrongTaskError: the model embeds, scores or transcribes.
    """
    if info.encoder is not None:
        does, route = ("embeds texts", "embeddings") if info.encoder.task == "embed" else ("scores pairs", "rerank")
        raise WrongTaskError(f"{info.model_name} does not generate; it {does}", "model", over_http=f"ask /v1/{route}")
    if info.audio_input is not None:
        raise WrongTaskError(
            f"{info.model_name} transcribes audio; it does not continue texts",
            "model",
            over_http="ask /v1/audio/transcriptions",
        )


MAX_CANDIDATES = 256
"""Maximum number of candidate tokens per beam."""


class InputProcessor:
    """Builds `Request`s from prompts and parameters, for one engine."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        *,
        refuse_long_max_tokens: bool = False,
        default_sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            default_sampling: overrides the checkpoint's defaults, by the names of `DEFAULTABLE`.
            refuse_long_max_tokens: whether a `max_tokens` beyond the context is refused rather than lowered.

        Raises:
            CheckpointError: the checkpoint's `generation_config.json` has an invalid value.
        """
        self._tokenizer = tokenizer
        self.refuse_long_max_tokens = refuse_long_max_tokens
        self._info = info
        self.defaults = replace(_check_defaults(info), **default_sampling)
        """What a request leaves unset: by the server, or else by the checkpoint."""
        ends = list(info.defaults.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)  # fine-tunes may name their end of turn only there
        # some checkpoints name ids beyond the vocabulary, which are never generated
        self._eos = tuple(token for token in dict.fromkeys(ends) if token < info.vocab_size)
        self._default_bans, self._default_bias = _default_edits(info, self._eos)
        self._random = SystemRandom() if info.seed is None else Random(info.seed)
        self._spellings = functools.lru_cache(maxsize=16)(self._encode_words)  # a call may have thousands of prompts

    def engine_changed(self, info: EngineInfo) -> None:
        """Apply the limits of another engine with the same model."""
        self._info = info

    def fits(self, request: Request) -> bool:
        """Whether the engine can still serve a request that was accepted before."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        if request.adapter is not None and request.adapter.num_elements > self._info.max_adapter_elements:
            return False
        return longest <= self._info.max_model_len and request.params.width <= self._info.max_num_seqs

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        *,
        request_id: str,
        arrival: float,
        priority: int = 0,
        namespace: str = "",
        tenant: str = "",
        adapter: Adapter | None = None,
        images: tuple[Image, ...] = (),
    ) -> Request:
        """Validate the prompt and parameters, and resolve unset ones to defaults.

        Args:
            prompt: text, or token ids.
            params: None for the checkpoint's defaults.
            arrival: seconds of `time.monotonic()`.
            priority, namespace, tenant, adapter, images: see `Request`.

        Raises:
            PromptTooLongError: the prompt exceeds the context, or with `refuse_long_max_tokens` prompt and
                `max_tokens` together.
            InvalidRequestError: the engine cannot serve it; `param` names the invalid field.
        """
        if self._info.audio_input is None or not images:
            check_generates(self._info)
        params = params or SamplingParams()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {priority!r}", "priority")
        token_ids, max_tokens = self.check(prompt, params)
        if self.refuse_long_max_tokens and params.max_tokens is not None and params.max_tokens > max_tokens:
            self._refuse_max_tokens(len(token_ids), params.max_tokens)
        resolved = self._resolve(params, max_tokens)
        return Request(request_id, token_ids, resolved, arrival, priority, namespace, tenant, adapter, images=images)

    def make_encoding(
        self,
        encoded: EncodedText,
        *,
        request_id: str,
        arrival: float,
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        """The request of a text for an embedding model or reranker, already checked by `TextEncoder`."""
        return Request(
            request_id,
            encoded.token_ids,
            NO_ANSWER,
            arrival,
            priority,
            tenant=tenant,
            second_text=encoded.second_text,
        )

    def with_default_stops(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the checkpoint's stop strings, where they name none and do not ignore its ends."""
        stops = self._info.defaults.stop
        if params.stop or not stops or params.ignore_eos or params.num_beams > 1 or self._tokenizer is None:
            return params
        return replace(params, stop=stops)

    def check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], int]:
        """Validate a request, which another engine may have accepted before; raises the same errors as `make_request`.

        Returns the prompt's token ids and the maximum number of answer tokens.
        """
        token_ids = self._tokens_of(prompt)
        max_tokens = self._max_tokens(len(token_ids), params)
        self._check_limits(params, len(token_ids), max_tokens)
        return token_ids, max_tokens

    def _tokens_of(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer.json: give the prompt as token ids", "prompt")
            token_ids = tuple(self._tokenizer.encode(prompt)) if prompt else ()
        elif isinstance(prompt, (list, tuple, array, range)):
            token_ids = tuple(prompt)
        else:
            raise InvalidRequestError(
                f"the prompt must be text or a list of token ids, not {type(prompt).__name__}", "prompt"
            )
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it must have at least one token", "prompt")
        vocab = self._info.vocab_size
        for token in token_ids:
            if type(token) is not int:
                raise InvalidRequestError(f"the prompt's token ids must be whole numbers, not {token!r}", "prompt")
            if not 0 <= token < vocab:
                raise InvalidRequestError(
                    f"the prompt's token id {token} is outside the vocabulary: ids go from 0 to {vocab - 1}", "prompt"
                )
        return token_ids

    def _max_tokens(self, prompt_length: int, params: SamplingParams) -> int:
        context = self._info.max_model_len
        if prompt_length >= context:
            raise PromptTooLongError(
                # Clients recognise this error by OpenAI's or Anthropic's wording, so it contains both.
                f"the prompt is too long: {prompt_length} tokens > {context - 1} maximum; this model's maximum context "
                f"length is {context} tokens, of which the answer needs at least one",
                "prompt",
            )
        left = context - prompt_length
        requested = self._info.defaults.max_tokens if params.max_tokens is None else params.max_tokens
        return left if requested is None else min(max(requested, params.min_tokens), left)

    def _refuse_max_tokens(self, prompt_length: int, max_tokens: int) -> None:
        context = self._info.max_model_len
        raise PromptTooLongError(
            # Claude Code lowers max_tokens by itself if it reads these words, other clients those of OpenAI.
            f"input length and `max_tokens` exceed context limit: {prompt_length} + {max_tokens} > {context}; this "
            f"model's maximum context length is {context} tokens: lower max_tokens to at most "
            f"{context - prompt_length}, or shorten the prompt",
            "max_tokens",
        )

    def _check_limits(self, params: SamplingParams, prompt_length: int, max_tokens: int) -> None:
        info = self._info
        if params.num_beams > info.max_num_seqs:
            raise InvalidRequestError(
                f"num_beams is {params.num_beams}, but this engine runs at most {info.max_num_seqs} sequences at once "
                "(max_num_seqs), and the beams of a search run together: lower num_beams",
                "num_beams",
            )
        total = params.num_beams * (prompt_length + max_tokens)
        if info.max_batch_total_tokens is not None and total > info.max_batch_total_tokens:
            factor, name = (", times num_beams,", "num_beams") if params.num_beams > 1 else ("", "max_tokens")
            raise InvalidRequestError(
                f"prompt and max_tokens{factor} come to {total} tokens; this engine admits at most "
                f"{info.max_batch_total_tokens} at once (max_batch_total_tokens): lower {name}",
                name,
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but the context leaves {max_tokens} for the answer; lower "
                f"min_tokens to at most {max_tokens}",
                "min_tokens",
            )
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, which stop strings need: use stop_token_ids", "stop"
            )
        if params.structured is not None and self._tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer, which structured answers need: ask for plain text, or serve a checkpoint "
                "with a tokenizer.json",
                "structured",
            )
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "bad_token_ids": params.bad_token_ids,
            "allowed_token_ids": params.allowed_token_ids,
            "transcript": None if params.transcript is None else params.transcript.tokens,
        }
        for name, tokens in named.items():
            highest = max(tokens or (), default=0)
            if highest >= info.vocab_size:
                raise InvalidRequestError(
                    f"{name} holds {highest}, outside the vocabulary: ids go from 0 to {info.vocab_size - 1}", name
                )

    def _resolve(self, params: SamplingParams, max_tokens: int) -> ResolvedParams:
        defaults = self.defaults
        eos = () if params.ignore_eos else self._eos
        stops = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        min_tokens, bias = params.min_tokens, params.logit_bias
        banned = self._banned(params) if params.bad_words or params.bad_token_ids else ()
        if params.num_beams == 1:
            min_tokens = min_tokens or min(self._info.defaults.min_tokens, max_tokens)
            allowed = {(token,) for token in params.allowed_token_ids or ()}  # which the caller names
            banned = tuple(dict.fromkeys((*banned, *(run for run in self._default_bans if run not in allowed))))
            bias = {**self._default_bias, **bias}
        if banned or min_tokens:
            self._check_some_token_left(params, banned, stops if min_tokens else ())
        logprobs = params.logprobs
        if params.best_of is not None and logprobs is None:
            logprobs = 0  # the log-probabilities rank the answers
        resolved = ResolvedParams(
            n=params.n if params.best_of is None else params.best_of,
            temperature=float(_first(params.temperature, defaults.temperature, 1.0)),
            top_k=_first(params.top_k, defaults.top_k, 0),
            top_p=float(_first(params.top_p, defaults.top_p, 1.0)),
            min_p=float(_first(params.min_p, defaults.min_p, 0.0)),
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            logprobs=logprobs,
            prompt_logprobs=params.prompt_logprobs,
            structured=params.structured,
            typical_p=float(_first(params.typical_p, defaults.typical_p, 1.0)),
            repetition_penalty=float(_first(params.repetition_penalty, defaults.repetition_penalty, 1.0)),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
            share_penalty=float(params.share_penalty),
            logit_bias=tuple((token, float(value)) for token, value in bias.items() if value),
            banned=banned,
            allowed_token_ids=None if params.allowed_token_ids is None else tuple(sorted({*params.allowed_token_ids})),
            transcript=params.transcript,
        )
        return resolved if params.num_beams == 1 else self._for_beams(resolved, params)

    def _for_beams(self, resolved: ResolvedParams, params: SamplingParams) -> ResolvedParams:
        """Beam search uses the model's probabilities only; the checkpoint's default sampling controls do not apply."""
        candidates = params.num_beams + len(resolved.stop_token_ids)
        most = min(MAX_CANDIDATES, self._info.vocab_size)
        if candidates > most:
            raise InvalidRequestError(
                f"num_beams plus the number of stop tokens is {candidates}; the maximum for this model is {most}: "
                "lower num_beams or leave out stop_token_ids",
                "num_beams",
            )
        beams = Beams(params.num_beams, float(params.length_penalty), params.early_stopping)
        return replace(
            resolved, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repetition_penalty=1.0, beams=beams
        )

    def _banned(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the banned words: each word by itself, and after a space."""
        if params.bad_words and self._tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer, which bad_words needs: use bad_token_ids", "bad_words"
            )
        runs = [(token,) for token in params.bad_token_ids]
        return tuple(dict.fromkeys((*runs, *self._spellings(tuple(params.bad_words)))))

    def _encode_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        runs: list[tuple[int, ...]] = []
        for word in words:
            assert self._tokenizer is not None
            spellings = (word, " " + word.lstrip())
            runs += [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spellings]
        return tuple(run for run in runs if run)

    def _check_some_token_left(
        self, params: SamplingParams, banned: tuple[tuple[int, ...], ...], early: tuple[int, ...]
    ) -> None:
        """Refuse parameters that ban every token; `early`: tokens banned at the beginning of the answer."""
        singles = {run[0] for run in banned if len(run) == 1} | set(early)
        allowed = params.allowed_token_ids
        if singles.issuperset(range(self._info.vocab_size) if allowed is None else allowed):
            name = "bad_token_ids" if allowed is None else "allowed_token_ids"
            raise InvalidRequestError(
                "no token is left: bad_words, bad_token_ids and the stop tokens, which min_tokens bans at first, ban "
                f"{'the whole vocabulary' if allowed is None else 'all that allowed_token_ids allows'}",
                name,
            )


def _default_edits(info: EngineInfo, eos: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], dict[int, float]]:
    """The sequences of tokens that the checkpoint bans, and its biases. As in `transformers`, a bad word bans no end
    of text; ids beyond the vocabulary are never generated."""
    defaults, size = info.defaults, info.vocab_size
    words = [run for run in defaults.bad_words if not (len(run) == 1 and run[0] in eos)]
    bans = [(token,) for token in defaults.bad_token_ids] + words
    bias = {token: value for token, value in defaults.logit_bias if token < size}
    return tuple(run for run in bans if max(run) < size), bias


def _check_defaults(info: EngineInfo) -> SamplingParams:
    defaults = info.defaults
    try:
        SamplingParams(
            stop=defaults.stop,
            max_tokens=defaults.max_tokens,
            bad_token_ids=defaults.bad_token_ids,
            logit_bias=dict(defaults.logit_bias),
        )
        SamplingParams(min_tokens=defaults.min_tokens)
        return SamplingParams(**{name: getattr(defaults, name) for name in DEFAULTABLE})
    except InvalidRequestError as error:
        raise CheckpointError(f"generation_config.json in {info.model_path}: {error}") from error


def _first(wanted: T | None, default: T | None, neutral: T) -> T:
    return wanted if wanted is not None else default if default is not None else neutral
