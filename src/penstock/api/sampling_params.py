"""Sampling parameters: as the caller gives them, and as the engine receives them.

SamplingParams ──InputProcessor.make_request──> ResolvedParams
(checked by itself)                             (with the checkpoint's defaults, and a seed)
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, TypeVar, get_args

from penstock.api.transcript_rules import TranscriptRules
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError

T = TypeVar("T")

EarlyStopping = bool | Literal["never"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""Maximum characters of all stop strings together."""
MAX_N = 128
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_LISTED_TOKENS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 8192
"""Maximum characters of all bad words together."""
SEED_RANGE = 2**64
MAX_FORM_CHARACTERS = 2**19
"""Maximum characters of a schema, of a grammar, or of all choices together."""
_UNPAIRED_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class JsonRegions:
    """Where an answer contains JSON documents, in which no key may occur twice.

    Marks are in Lark's notation: text in quotes, a special token as <[id]>, or several of them in a row.
    """

    after: tuple[str, ...] = ("",)
    """Marks that precede a document; an empty one stands for the beginning of the answer, after its reasoning."""
    brackets: str = "{["
    """Characters that a JSON document may begin with."""
    key: str = ""
    """The property of a document that the schemas of calls apply to; empty: the document itself."""
    thinking: tuple[str, str] | None = None
    """Marks around the reasoning before the answer; None if the model does not reason."""
    thinks_first: bool = False
    """Whether the answer begins in the reasoning."""


class RoundedNumber(float):
    """A number of a JSON text that no double represents exactly; `literal` is how it was written."""

    literal: str


def check_exact(schema: object, param: str, pointer: str = "") -> None:
    """
    Raises:
        InvalidRequestError: a number of the schema was rounded when it was read.
    """
    pending = [(pointer, schema)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, RoundedNumber):
            where = f"{param}: {place or '/'} is {value.literal}"
            raise InvalidRequestError(f"{where}, which a double cannot represent exactly: write fewer digits", param)
        if isinstance(value, (list, tuple)):
            pending += [(f"{place}/{index}", item) for index, item in enumerate(value)]
        elif isinstance(value, Mapping):
            keys = ((str(key).replace("~", "~0").replace("/", "~1"), item) for key, item in value.items())
            pending += [(f"{place}/{key}", item) for key, item in keys]


@dataclass(frozen=True, slots=True)
class Structured:
    """The form that an answer must have; only tokens that keep it valid are sampled.

    Raises:
        InvalidRequestError: a field does not fit the kind. A form that cannot be compiled is refused later, when the
            request is accepted.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    text: str = ""
    """The schema as JSON text, the regular expression, or the grammar in Lark's notation; by its kind."""
    choices: tuple[str, ...] = ()
    """The permitted answers, for `choice`."""
    before: str = ""
    """A rule `before`, in Lark's notation, of what may precede the form: the model's reasoning."""
    header: str = ""
    """Header of a message, in Lark's notation, before the form itself but not before calls."""
    calls: str = ""
    """A Lark rule `calls`: tool calls that an answer may consist of instead of the form."""
    documents: JsonRegions | None = None
    """Where the answer contains JSON; None: unknown for a grammar, otherwise the whole answer is one document."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Structured.__annotations__["kind"]):
            raise InvalidRequestError(f"structured: unknown kind {self.kind!r}", "structured")
        if not isinstance(self.text, str) or (not self.text and self.kind in ("json_schema", "regex", "grammar")):
            raise InvalidRequestError(f"structured: a {self.kind} must be a non-empty text", "structured")
        object.__setattr__(self, "choices", _listed("structured", self.choices))
        if self.kind == "choice" and not self.choices:
            raise InvalidRequestError("structured: a choice needs at least one text", "structured")
        for name in ("before", "header", "calls"):
            if not isinstance(value := getattr(self, name), str):
                raise InvalidRequestError(f"structured: {name} must be a text, not {value!r}", "structured")
        for choice in self.choices:
            if not isinstance(choice, str) or not choice:
                raise InvalidRequestError(f"structured: choices must be non-empty texts, not {choice!r}", "structured")
        for text in (self.text, self.before, self.header, self.calls, *self.choices):
            if half := _UNPAIRED_SURROGATE.search(text):
                near = text[max(half.start() - 20, 0) : half.end() + 20]
                raise InvalidRequestError(
                    f"structured: {near!r} in its {self.kind} contains an unpaired surrogate",
                    "structured",
                )

    @property
    def num_characters(self) -> int:
        """Characters of all its texts."""
        return sum(map(len, (self.text, self.before, self.header, self.calls, *self.choices)))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str | type) -> "Structured":
        """JSON that validates against a schema: an object, its JSON text, or a pydantic model class."""
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        try:
            check_exact(schema, "structured")
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"structured: the schema cannot be JSON: {error}", "structured") from error
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> "Structured":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> "Structured":
        """A text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, lark: str) -> "Structured":
        """A text of a context-free language, in Lark's notation; it begins at the rule `start`."""
        return cls("grammar", lark)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Structured":
        """One of these texts."""
        return cls("choice", choices=tuple(choices))


DEFAULTABLE = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""Fields whose defaults a checkpoint, or a server's `--default-sampling`, may set."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Controls of sampling, and conditions of stopping.

    A field that is None takes its value from the checkpoint's `generation_config.json`, or else the default given below
    the field.

    Raises:
        InvalidRequestError: a value is out of its range; `param` names it.
    """

    n: int = 1
    """Answers per prompt, 1 to 128."""
    temperature: float | None = None
    """0 is greedy; default 1.0."""
    top_k: int | None = None
    """Keep only the k most likely tokens; 0 keeps all; default 0."""
    top_p: float | None = None
    """Keep the most likely tokens whose probabilities add up to p, in (0, 1]; default 1.0."""
    min_p: float | None = None
    """Drop tokens less likely than min_p times the most likely one, in [0, 1]; default 0.0."""
    typical_p: float | None = None
    """Keep the most typical tokens whose probabilities add up to this, in (0, 1]; default 1.0."""
    repetition_penalty: float | None = None
    """Divides positive logits of tokens in prompt or answer, multiplies negative ones, in [0.01, 100]; default 1.0."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the answer, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the answer, in [-2, 2]."""
    share_penalty: float = 0.0
    """TGI's frequency_penalty: subtracted, times the token's share of prompt and answer, from its logit."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Values added to logits, by token id, in [-100, 100]."""
    bad_words: Sequence[str] = ()
    """Words that the answer must not contain, as the tokenizer encodes them at the beginning and after a space."""
    bad_token_ids: Sequence[int] = ()
    """Tokens that the answer must not contain."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that the answer may contain, end-of-text tokens included; None: any."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs; None: random."""
    max_tokens: int | None = None
    """The answer ends after this many tokens; None: the checkpoint's number, or as many as the context holds."""
    min_tokens: int = 0
    """Neither an end-of-text token nor a stop string ends the answer before this many; 0: the checkpoint's number."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer, which does not include them; none: the checkpoint's."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, in addition to the checkpoint's."""
    ignore_eos: bool = False
    """Do not end the answer at the checkpoint's end-of-text tokens."""
    logprobs: int | None = None
    """k, 0 to 20: log-probabilities of each token and of the k most likely; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    best_of: int | None = None
    """Sample this many answers, and return the n with the highest mean log-probability, best first."""
    num_beams: int = 1
    """Above 1: beam search with this many beams, which returns the n hypotheses with the highest scores."""
    length_penalty: float = 1.0
    """Beam search: a hypothesis' score is its log-probability divided by its length to this power."""
    early_stopping: EarlyStopping = False
    """Beam search: end when num_beams hypotheses are complete (true), when a better one is unlikely (false), or when a
    better one is impossible ("never")."""
    structured: Structured | None = None
    """The form that the answer must have; None: any."""
    shown_special_tokens: Sequence[int] = ()
    """Special tokens that the text includes; it omits all others."""
    transcript: TranscriptRules | None = None
    """Rules for the tokens of a transcript, which the transcribing routes and methods set."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        for name in ("stop_token_ids", "shown_special_tokens"):
            set_field(self, name, _checked_tokens(name, getattr(self, name)))
        _check_int("n", self.n, 1, MAX_N, needed=True)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("seed", self.seed, 0, SEED_RANGE - 1)
        _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1, needed=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_int("best_of", self.best_of, 1, MAX_N)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos must be true or false, not {self.ignore_eos!r}", "ignore_eos")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}): lower min_tokens or "
                "raise max_tokens",
                "min_tokens",
            )
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise InvalidRequestError(f"structured must be a Structured, not {self.structured!r}", "structured")
        if self.transcript is not None and not isinstance(self.transcript, TranscriptRules):
            raise InvalidRequestError(f"transcript must be TranscriptRules, not {self.transcript!r}", "transcript")
        if self.stop:
            self._check_stops()
        self._check_logit_controls()
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of must be at least n, which is {self.n}; not {self.best_of}", "best_of")
        self._check_beams()

    def _check_logit_controls(self) -> None:
        _check_float("typical_p", self.typical_p, 0.0, 1.0, above_low=True)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for name in ("frequency_penalty", "presence_penalty", "share_penalty"):
            _check_float(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, needed=True)
        set_field = object.__setattr__
        set_field(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.bad_words != ():
            set_field(self, "bad_words", _checked_words(self.bad_words))
        set_field(self, "bad_token_ids", _checked_tokens("bad_token_ids", self.bad_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _checked_tokens("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids is empty: no token could be sampled", "allowed_token_ids")
            set_field(self, "allowed_token_ids", allowed)

    def _check_beams(self) -> None:
        _check_int("num_beams", self.num_beams, 1, MAX_N, needed=True)
        _check_float("length_penalty", self.length_penalty, -10.0, 10.0, needed=True)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r}', "early_stopping"
            )
        if self.num_beams == 1:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise InvalidRequestError(
                        f"{name} is for beam search: set num_beams above 1, or leave it out", name
                    )
            return
        if self.n > self.num_beams:
            raise InvalidRequestError(
                f"n is {self.n}, but {self.num_beams} beams (num_beams) give at most as many answers", "n"
            )
        for name, neutrals in _NEUTRAL_FOR_BEAMS.items():
            if getattr(self, name) not in neutrals:
                raise InvalidRequestError(f"{name} does not work with beam search (num_beams): leave it out", name)

    @property
    def is_streamable(self) -> bool:
        """Whether tokens can be streamed: not with beam search or `best_of`, which select answers at the end."""
        return self.num_beams == 1 and (self.best_of is None or self.best_of == self.n)

    def check_streamable(self) -> None:
        """
        Raises:
            InvalidRequestError: the answers cannot be streamed.
        """
        if self.num_beams > 1:
            raise InvalidRequestError(
                "beam search cannot be streamed: its answers are known only at the end", "num_beams"
            )
        if not self.is_streamable:
            raise InvalidRequestError(
                "best_of cannot be streamed: the best answers are known only at the end", "best_of"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
            )
        _check_characters("stop", self.stop, MAX_STOP_CHARACTERS)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop must contain non-empty strings, not {text!r}", "stop")
            if _UNPAIRED_SURROGATE.search(text):
                raise InvalidRequestError(f"stop contains {text!r}, an unpaired surrogate", "stop")


_NEUTRAL_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_k": (None, 0),
    "top_p": (None, 1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 1),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "share_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ((),),
    "bad_token_ids": ((),),
    "allowed_token_ids": (None,),
    "best_of": (None,),
    "stop": ((),),
    "structured": (None,),
}
"""Parameters that beam search does not support, with their neutral values."""


def _listed(name: str, values: Sequence[T]) -> tuple[T, ...]:
    if not isinstance(values, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list, not {values!r}", name)
    return tuple(values)


def _checked_tokens(name: str, tokens: Sequence[int]) -> tuple[int, ...]:
    listed = _listed(name, tokens)
    if len(listed) > MAX_LISTED_TOKENS:
        raise InvalidRequestError(f"{name} has {len(listed)} tokens; at most {MAX_LISTED_TOKENS} are allowed", name)
    for token in listed:
        _check_int(name, token, 0, 2**31 - 1, needed=True)
    return listed


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, not {bias!r}", "logit_bias")
    _checked_tokens("logit_bias", tuple(bias))
    for value in bias.values():
        _check_float("logit_bias", value, -MAX_BIAS, MAX_BIAS, needed=True)
    return dict(bias)


def _checked_words(words: Sequence[str]) -> tuple[str, ...]:
    listed = _listed("bad_words", words)
    if len(listed) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(listed)} words; at most {MAX_BAD_WORDS} are allowed", "bad_words"
        )
    _check_characters("bad_words", listed, MAX_BAD_WORD_CHARACTERS)
    for word in listed:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequestError(f"bad_words must contain words, not {word!r}", "bad_words")
        if _UNPAIRED_SURROGATE.search(word):
            raise InvalidRequestError(f"bad_words contains {word!r}, an unpaired surrogate", "bad_words")
    return listed


def _check_characters(name: str, texts: Sequence[object], most: int) -> None:
    count = sum(len(text) for text in texts if isinstance(text, str))
    if count > most:
        raise InvalidRequestError(
            f"{name} has {count} characters; at most {most} are allowed in all its strings together", name
        )


def _check_int(name: str, value: int | None, low: int, high: int, *, needed: bool = False) -> None:
    if value is None and not needed:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be from {low} to {high}, not {value}", name)


def _check_float(
    name: str, value: float | None, low: float, high: float, *, above_low: bool = False, needed: bool = False
) -> None:
    if value is None and not needed:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # NaN
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", name)
    if not low <= value <= high or (above_low and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{name} must be {bounds}, not {value!r}", name)


@dataclass(frozen=True, slots=True)
class Beams:
    """Beam search, as `SamplingParams` describes it."""

    num_beams: int
    """At least 2."""
    length_penalty: float
    early_stopping: EarlyStopping


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """`SamplingParams` with every value set, as the engine receives them. Stop strings stay outside the engine."""

    n: int
    """Answers that the engine generates: `best_of`, if that is set."""
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
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    share_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, value to add), each token once."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Distinct sequences of tokens that the answer must not contain."""
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    beams: Beams | None = None
    transcript: TranscriptRules | None = None

    @property
    def num_sequences(self) -> int:
        """Maximum sequences that run together for the request."""
        return self.n if self.beams is None else self.beams.num_beams

    @property
    def width(self) -> int:
        """Minimum sequences that must run together: all beams of a search; of `n` answers, one."""
        return 1 if self.beams is None else self.beams.num_beams


NO_ANSWER = ResolvedParams(
    n=1,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    max_tokens=0,
    min_tokens=0,
    stop_token_ids=(),
    logprobs=None,
)
"""Parameters for a text that is embedded or scored: no token is generated."""
