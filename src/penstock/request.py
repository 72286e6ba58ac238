"""What goes in and what comes out: the plain data that every other part passes along.

SamplingParams ──resolve()──> Request(ResolvedParams) ──engine──> SequenceOutput ──> RequestOutput
(what a user writes)          (what the engine is told)           (per step)        (what a user reads)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeVar, get_args

from penstock.errors import InvalidRequestError

T = TypeVar("T")

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128
SEED_RANGE = 2**64


class FinishReason(str, Enum):
    """Why a sequence ended. Every sequence ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Structured:
    """The form that an answer must have; only tokens that lead to it are sampled.

    Raises:
        InvalidRequestError: it is not of the shape that its kind asks for. What cannot be compiled is refused later,
            where the request is accepted.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    text: str = ""
    """The schema as JSON text, the regular expression, or the grammar in Lark's notation; by its kind."""
    choices: tuple[str, ...] = ()
    """The answers that are allowed, for `choice`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Structured.__annotations__["kind"]):
            raise InvalidRequestError(f"structured: there is no kind {self.kind!r}", "structured")
        if not isinstance(self.text, str) or (not self.text and self.kind in ("json_schema", "regex", "grammar")):
            raise InvalidRequestError(f"structured: a {self.kind} must be a text, and not empty", "structured")
        object.__setattr__(self, "choices", _listed("structured", self.choices))
        if self.kind == "choice" and not self.choices:
            raise InvalidRequestError("structured: a choice needs at least one answer to choose", "structured")
        for choice in self.choices:
            if not isinstance(choice, str) or not choice:
                raise InvalidRequestError(f"structured: choices must be non-empty texts, not {choice!r}", "structured")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Structured":
        """JSON that a schema, given as an object or as its JSON text, holds for."""
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"structured: the schema cannot be JSON: {error}", "structured") from error

    @classmethod
    def json_object(cls) -> "Structured":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> "Structured":
        """A text that matches the whole of a regular expression."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, lark: str) -> "Structured":
        """A text of a context-free language, in Lark's notation; it begins at the rule `start`."""
        return cls("grammar", lark)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Structured":
        """One of these texts."""
        return cls("choice", choices=tuple(choices))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Where a field is None the checkpoint's `generation_config.json` decides, and failing that the neutral value
    given beside the field.

    Raises:
        InvalidRequestError: a value is out of its range; `param` names it.
    """

    n: int = 1
    """How many answers to the one prompt, 1 to 128."""
    temperature: float | None = None
    """0 is greedy; neutral 1.0."""
    top_k: int | None = None
    """Keep only the k likeliest tokens; 0 keeps all; neutral 0."""
    top_p: float | None = None
    """Keep the likeliest tokens whose probabilities add up to p, in (0, 1]; neutral 1.0."""
    min_p: float | None = None
    """Drop tokens less likely than min_p times the likeliest, in [0, 1]; neutral 0.0."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs; None draws one."""
    max_tokens: int | None = None
    """Exactly this many tokens unless something stops earlier; None: as many as the context holds."""
    min_tokens: int = 0
    """Neither an end-of-text token nor a stop string ends the answer before this many tokens."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer; the text is cut before the first of them."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, beside the checkpoint's own."""
    ignore_eos: bool = False
    """Go on past the checkpoint's end-of-text tokens."""
    logprobs: int | None = None
    """None: no log-probabilities; k: those of the chosen token and of the k likeliest, 0 to 20."""
    structured: Structured | None = None
    """The form that the answer must have; None: any."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        set_field(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("seed", self.seed, 0, SEED_RANGE - 1)
        _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos must be true or false, not {self.ignore_eos!r}", "ignore_eos")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise InvalidRequestError(f"structured must be a Structured, not {self.structured!r}", "structured")
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop must hold non-empty strings, not {text!r}", "stop")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequestError(f"stop holds {text!r}, half a surrogate pair: no text does", "stop")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)


def _listed(name: str, values: Sequence[T]) -> tuple[T, ...]:
    if not isinstance(values, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list, not {values!r}", name)
    return tuple(values)


def _check_int(name: str, value: int | None, low: int, high: int) -> None:
    if value is None and name not in ("n", "min_tokens", "stop_token_ids"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be from {low} to {high}, not {value}", name)


def _check_float(name: str, value: float | None, low: float, high: float, *, above_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # NaN
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", name)
    if not low <= value <= high or (above_low and value == low):
        lower = "above" if above_low else "from"
        raise InvalidRequestError(f"{name} must be {lower} {low:g} and at most {high:g}, not {value!r}", name)


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """`SamplingParams` with nothing left open, as the engine sees them. Stop strings stay outside the engine."""

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    """Every token that ends a sequence: the checkpoint's (unless ignored) and the caller's."""
    logprobs: int | None
    structured: Structured | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request, complete: with the model it determines the answer."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: ResolvedParams
    arrival: float
    """When it was accepted, seconds of `time.monotonic()`."""
    priority: int = 0
    """Lower is served first, under the `priority` policy."""
    namespace: str = ""
    """Prefix-cache namespace: requests of different namespaces never share a block."""
    tenant: str = ""
    """On whose account it runs: the `fair` policy shares the engine between tenants."""


Resumed = tuple[tuple[int, ...] | None, ...]
"""How far a request's sequences got in an engine that is gone: their tokens; None for one that ended; () if fresh."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of a chosen token under the model, before any sampling control."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, best first."""


@dataclass(slots=True)
class SequenceOutput:
    """What one step gave one sequence. The engine sends these; each sequence's last has a `finish_reason`."""

    request_id: str
    index: int
    """Which of the request's `n` sequences."""
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    first_scheduled: float | None = None
    """On a sequence's first output: when its request was first part of a step, seconds of `time.monotonic()`."""
    num_cached_tokens: int = 0
    """On a sequence's first output: prompt tokens found in the prefix cache."""


@dataclass(slots=True)
class RequestTimes:
    """Moments of one request's life, seconds of `time.monotonic()`; None where it never got there."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` answers, so far or final."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None if none did."""
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """All that is known of a request: while it runs as far as it got, at its end complete."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    times: RequestTimes
    num_cached_tokens: int = 0
