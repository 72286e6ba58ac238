"""Requests and outputs: the plain data that every other part passes along.

SamplingParams ──make_request──> Request(ResolvedParams) ──engine──> SequenceOutput ──> RequestOutput
(what a user writes)             (what the engine is sent)           (per step)         (what a user reads)
"""

from dataclasses import field
from enum import Enum
from typing import Literal

from penstock.api.sampling_params import ResolvedParams
from penstock.dataclass import dataclass


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
    NO_TOKEN_ALLOWED = "no_token_allowed"
    """Its grammar or its other controls allow no next token."""
    IMAGE_NOT_ENCODED = "image_not_encoded"
    """The vision tower cannot encode one of its images."""


EXPIRED = "the request exceeded its time limit in the queue"
"""The message that goes with `ErrorReason.EXPIRED`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter (LoRA) of the model: its path, and its digest."""

    name: str
    """Name that requests use to select it."""
    path: str
    """Path of its folder on the engine's machine."""
    digest: str
    """Digest of its files."""
    num_elements: int
    """Total number of weight elements."""


MediaKind = Literal["image", "sound"]
"""What a model may take beside text; each kind has an encoder of its own. A kind is its name in messages."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image, or one tile of it, in a prompt: the resized picture that a model's vision tower encodes.

    Or a sound, or one window of it, that an audio encoder encodes; or a window of audio that a transcript is about,
    which stands for all tokens of the context: `count` is its length.
    """

    start: int
    """Position in the prompt of the first token that stands for it."""
    count: int
    """Number of tokens from there to the last that stands for it; those between that are not its placeholder (row
    breaks) are text."""
    rows: int
    """Its features are `rows * columns` vectors, in reading order, one per placeholder token."""
    columns: int
    height: int
    """Height and width of the resized picture, in pixels; of audio, mels and frames."""
    width: int
    digest: bytes
    """SHA-256 of height and width (uint32, little endian) and of the pixels."""
    pixels: bytes
    """uint8 [height, width, 3] RGB, row by row; of audio, float32 [height, width] log-mel features."""
    is_sound: bool = False
    """Whether it is audio."""

    @property
    def kind(self) -> MediaKind:
        return "sound" if self.is_sound else "image"


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
    """Tenant: the `fair` policy shares the engine between tenants."""
    adapter: Adapter | None = None
    """LoRA adapter; None: the base model."""
    second_text: int = 0
    """Position of the first token of type 1 in the prompt of a pair of texts; 0: there is none."""
    images: tuple[Image, ...] = ()
    """Images and sounds in the prompt, by ascending `start`; they do not overlap."""


Resumed = tuple[tuple[int, ...] | None, ...]
"""Tokens so far of each sequence, from a previous engine; None for a sequence that ended; () for a new request."""


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory of an engine that others, also on other machines, read by NIXL."""

    agent: bytes
    """Metadata of its agent: name, addresses, and keys of the memory."""
    address: int
    """Address of the block file's mapping in that process."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Location of a text's KV blocks that another engine computed."""

    file: str
    """A path that every process of the machine can open while that engine lives."""
    mark: str
    """Identity stored in the file: the path may later name another file, or one on another machine."""
    slots: tuple[tuple[int, int], ...]
    """(slot, bit mask of the cache groups present) per block, from the first block on."""
    memory: RemoteMemory | None = None
    """Memory that maps the file, for NIXL reads; None: read the file."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of a chosen token under the model, before any sampling control."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first."""
    text: str | None = None
    """The token's text, in outputs of the Python API; U+FFFD stands for a part of a character."""
    top_texts: tuple[str, ...] = ()
    """Texts of the tokens of `top`, likewise."""


@dataclass(slots=True)
class PromptPart:
    """Log-probabilities of a stretch of a prompt, each token's given those before it."""

    start: int
    """Prompt position of the first entry; at least 1, as the first token has no predecessor."""
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
    """Beam-search score."""
    error_reason: ErrorReason | None = None
    vector: bytes | None = None
    """Embedding, or logits of a scored pair, as float32 bytes in native byte order."""

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
    error_reason: ErrorReason | None = None
    score: float | None = None
    """Beam-search score: log-probability / length ** length_penalty."""


@dataclass(slots=True)
class RequestOutput:
    """Outputs of a request, partial while it runs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    times: RequestTimes
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token (None for the first) if requested; grows while the request runs."""
    num_generated_tokens: int = 0
    """Tokens of all answers, including those that `best_of` discards."""
    num_image_tokens: int = 0
    """Prompt tokens that stand for images' features."""
    num_audio_tokens: int = 0
    """Prompt tokens that stand for sounds' features."""
    vector: bytes | None = None
    """Embedding, or logits of a scored pair, as float32 bytes in native byte order."""
