"""Requests and outputs: the plain data that every other part passes along.

SamplingParams ──accept──> Request(ResolvedParams) ──engine──> SequenceOutput ──> RequestOutput
(what a user writes)       (what the engine is sent)           (per step)         (what a user reads)
"""

from dataclasses import dataclass, field
from enum import Enum

from penstock.sampling_params import ResolvedParams


class FinishReason(str, Enum):
    """Why a sequence ended. Every sequence ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class ErrorReason(str, Enum):
    """Why a sequence ended with `error`, where the HTTP status depends on it; `error` is the message."""

    EXPIRED = "expired"
    """Its time in the queue exceeded the limit."""


EXPIRED = "the request waited in the queue for as long as it may"
"""The message that goes with `ErrorReason.EXPIRED`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter (LoRA) of the model: its path, and its digest."""

    name: str
    """By which requests choose it."""
    path: str
    """Its folder, where the engine finds it."""
    digest: str
    """Of its files: equal for adapters that are equal."""
    num_elements: int
    """Of its weights."""


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
    adapter: Adapter | None = None
    """What is added to the model."""
    second_text: int = 0
    """Where, in the prompt of a pair of texts, the tokens of the second type begin; 0: nowhere."""


Resumed = tuple[tuple[int, ...] | None, ...]
"""How far a request's sequences got in an engine that is gone: their tokens; None for one that ended; () if fresh."""


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory of an engine that others, also on other machines, read by NIXL."""

    agent: bytes
    """Metadata of its agent: name, addresses, and keys of the memory."""
    address: int
    """Where its file of blocks begins, as that process counts."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Where the blocks of a text are that another engine has computed."""

    file: str
    """A path that every process of the machine can open while that engine lives."""
    mark: str
    """What the file calls itself, as the path may lead to another one later, or on another machine."""
    slots: tuple[tuple[int, int], ...]
    """Of the text's blocks, from the first on, each with the cache groups that it is there of: a bit each."""
    memory: RemoteMemory | None = None
    """To which the file is mapped; None: others read the file."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of a chosen token under the model, before any sampling control."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first."""


@dataclass(slots=True)
class PromptPart:
    """Log-probabilities of a stretch of a prompt, each token's given those before it."""

    start: int
    """Place in the prompt of the first; 1 at least, as nothing is before a prompt's first token."""
    logprobs: list[TokenLogprob]


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
    prompt: PromptPart | None = None
    """Prompt log-probabilities that the step computed, if asked for; all are sent before the first token."""
    score: float | None = None
    """Of a hypothesis of beam search."""
    error_reason: ErrorReason | None = None
    vector: bytes | None = None
    """What an encoder made of the text: float32, as this machine has it."""

    @property
    def is_sign_of_life(self) -> bool:
        """Whether it only reports that a step was made: a beam search has no output before its end."""
        return not self.token_ids and self.finish_reason is None and self.prompt is None


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
    score: float | None = None
    """Of a hypothesis of beam search: its log-probability by its length to the power of `length_penalty`."""


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
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """If asked for, an entry a token of the prompt: None for the first. While it runs, as many as are computed."""
    num_generated_tokens: int = 0
    """Of all answers, also those that `best_of` leaves out."""
    vector: bytes | None = None
    """What an encoder made of the text: float32, as this machine has it."""
