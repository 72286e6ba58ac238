"""Transcripts of sounds of any length, window by window; it computes nothing itself.

    next() ──Question──> a request about a window ──tokens──> answer() ──> segments, and where the next window begins

A sound longer than a window is transcribed as Whisper's authors do (Radford et al., 2022, arXiv:2212.04356, section
4.5), but never at a higher temperature than asked for: a window ends with the last complete segment in it.
"""

import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from penstock.api.request import CompletionOutput, Image
from penstock.api.sampling_params import SamplingParams
from penstock.api.transcript_rules import TranscriptRules
from penstock.config.audio_input import FRAMES_PER_SECOND, AudioInput
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError

_SIZE = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound as features."""

    features: NDArray[np.float32]
    """[mels, frames]; at least one window, which silence fills."""
    num_frames: int
    """Frames without that silence."""

    @property
    def seconds(self) -> float:
        return self.num_frames / FRAMES_PER_SECOND


@dataclass(frozen=True, slots=True)
class TranscriptOptions:
    """How a sound is transcribed."""

    language: str | None = None
    """Code of its language; None: the model tells."""
    translate: bool = False
    """Whether into English."""
    prompt: str = ""
    """Text that may come before, for its style and spelling."""
    temperature: float = 0.0
    seed: int | None = None
    has_segments: bool = False
    """Whether the times of segments are of interest. Long sounds have them anyway."""
    measures: bool = False
    """Whether segments have log-probabilities and the no-speech probability."""
    token_logprobs: bool = False
    """Whether segments have the log-probability of each token."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the transcript."""

    start: float
    """Seconds."""
    end: float
    text: str
    tokens: tuple[int, ...]
    seek: int
    """First frame of its window."""
    avg_logprob: float = math.nan
    """Mean log-probability of the window's tokens; so is the next of the window."""
    no_speech_prob: float = math.nan
    token_logprobs: tuple[float, ...] = ()
    """Of `tokens`, if they were asked for."""

    @property
    def compression_ratio(self) -> float:
        """Size of the text by that of its compressed form: high if it repeats itself."""
        text = self.text.encode()
        return len(text) / len(zlib.compress(text))


@dataclass(frozen=True, slots=True)
class Question:
    """A request about the current window."""

    prompt: tuple[int, ...]
    params: SamplingParams
    images: tuple[Image, ...]


@dataclass(slots=True)
class Transcript:
    """The answer so far."""

    seconds: float
    language: str
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


class Transcription:
    """Asks for the transcript of one sound, and puts it together."""

    def __init__(
        self,
        sound: Sound,
        audio_input: AudioInput,
        context: int,
        options: TranscriptOptions,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
    ) -> None:
        """
        Args:
            context: length of the model's context in tokens.
            encode, decode: the tokenizer's, without special tokens.

        Raises:
            InvalidRequestError: the model does not know the language or the task, or the prompt is too long or has
                control tokens.
        """
        self._sound, self._about, self._context, self._options = sound, audio_input, context, options
        self._decode = decode
        check_task(audio_input, options)
        self._language = _language_token(audio_input, options.language)
        self._before = self._prompt_tokens(encode)
        self._has_timestamps = options.has_segments or sound.num_frames > audio_input.num_frames
        self._seek = 0
        self.transcript = Transcript(sound.seconds, options.language or ("" if audio_input.languages else "en"))

    def _prompt_tokens(self, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        if not self._options.prompt.strip():
            return ()
        if self._about.previous is None:
            raise InvalidRequestError("this model takes no prompt: leave it out", "prompt")
        tokens, most = encode(" " + self._options.prompt.strip()), self._context // 2 - 1
        if len(tokens) > most:
            raise InvalidRequestError(f"prompt has {len(tokens)} tokens; at most {most} are taken", "prompt")
        if any(token >= self._about.end for token in tokens):
            raise InvalidRequestError("prompt names control tokens: leave them out", "prompt")
        return (self._about.previous, *tokens)

    def next(self) -> tuple[Question, ...]:
        """What to ask now, all at once; () at the end."""
        if self._seek >= self._sound.num_frames:
            return ()
        images, about, options = (self._window(),), self._about, self._options
        begin = (*self._before, about.start)
        if about.languages and self._language is None:
            languages = [token for _, token in about.languages]
            heard = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=languages, ignore_eos=True)
            return (Question((about.start,), heard, images),)
        params = SamplingParams(
            temperature=options.temperature,
            seed=options.seed,
            logprobs=0 if options.measures or options.token_logprobs else None,
            transcript=TranscriptRules(
                about.first_timestamp,
                about.end,
                about.begin_suppress,
                self._has_timestamps,
                about.max_initial_timestamp,
            ),
        )
        asked = Question((*begin, *self._control()), params, images)
        if not options.measures:
            return (asked,)
        silent = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[about.no_speech], logprobs=0)
        return asked, Question(begin, silent, images)

    def _control(self) -> tuple[int, ...]:
        about = self._about
        task = about.translate if self._options.translate else about.transcribe
        language = self._language if about.languages else None
        last = None if self._has_timestamps else about.no_timestamps
        return tuple(token for token in (language, task, last) if token is not None)

    def _window(self) -> Image:
        """The window from `_seek` on; frames beyond the sound are zeros."""
        mels, frames = self._about.num_mels, self._about.num_frames
        features = np.zeros((mels, frames), np.float32)
        part = self._sound.features[:, self._seek : self._seek + frames]
        features[:, : part.shape[1]] = part
        pixels = features.tobytes()
        digest = hashlib.sha256(_SIZE.pack(mels, frames) + pixels).digest()
        return Image(0, self._context, 1, self._about.num_positions, mels, frames, digest, pixels, is_sound=True)

    def answer(self, answers: Sequence[CompletionOutput]) -> list[Segment]:
        """Take the answers to `next`; returns the segments that they add."""
        first = answers[0]
        if self._about.languages and self._language is None:
            self._language = first.token_ids[0]
            self.transcript.language = next(code for code, token in self._about.languages if token == self._language)
            return []
        tokens = [token for token in first.token_ids if token != self._about.end]
        logprobs = [entry.logprob for entry in first.logprobs or []]
        logprob = no_speech = math.nan
        if self._options.measures:
            logprob = sum(logprobs) / max(1, len(logprobs))
            no_speech = math.exp((answers[1].logprobs or [])[0].logprob)
        left = min(self._sound.num_frames - self._seek, self._about.num_frames)
        cuts, advance = [(0.0, left / FRAMES_PER_SECOND, tokens)], left
        if self._has_timestamps:
            cuts, advance = cut_segments(tokens, left, self._about)
        offset, made, place = self._seek / FRAMES_PER_SECOND, list[Segment](), 0
        for begin, end, part in cuts:  # one after the other in `tokens`, from the first on
            text = self._decode([token for token in part if token < self._about.end])
            own = tuple(logprobs[place : place + len(part)]) if self._options.token_logprobs else ()
            place += len(part)
            made.append(Segment(offset + begin, offset + end, text, tuple(part), self._seek, logprob, no_speech, own))
        self._seek += advance
        self.transcript.segments += made
        return made


def check_task(about: AudioInput, options: TranscriptOptions) -> None:
    """
    Raises:
        InvalidRequestError: the model does not know the task or the language.
    """
    if options.translate and about.translate is None:
        raise InvalidRequestError(
            "this model transcribes, and translates nothing: use one of several languages", "model"
        )
    _language_token(about, options.language)


def _language_token(about: AudioInput, language: str | None) -> int | None:
    known: dict[str, int | None] = {**dict(about.languages)} or {"en": None}
    if language is None:
        return None
    if language not in known:
        listed = ", ".join(sorted(known))
        raise InvalidRequestError(f"language {language[:40]!r} is unknown to this model; it knows {listed}", "language")
    return known[language]


Cut = tuple[float, float, list[int]]
"""Start and end in seconds of the window, and tokens."""


def cut_segments(tokens: list[int], num_frames: int, about: AudioInput) -> tuple[list[Cut], int]:
    """Divide a window's answer at pairs of timestamps; returns segments, and the frames until the next window.

    Args:
        num_frames: frames of the window that are the sound's.
    """
    first, step = about.first_timestamp, about.step_seconds
    stamped = [token >= first for token in tokens]
    ends = [index for index in range(1, len(tokens)) if stamped[index - 1] and stamped[index]]
    is_complete = stamped[-2:] == [False, True]  # silence after the last timestamp
    if not ends:
        stamps = [token - first for token in tokens if token >= first]
        end = stamps[-1] * step if stamps and stamps[-1] else num_frames / FRAMES_PER_SECOND
        return ([(0.0, end, tokens)] if tokens else []), num_frames
    if is_complete:
        ends.append(len(tokens))
    cuts: list[Cut] = []
    for begin, end in zip([0, *ends], ends, strict=False):
        part = tokens[begin:end]
        cuts.append(((part[0] - first) * step, (part[-1] - first) * step, part))
    if is_complete:
        return cuts, num_frames
    advance = (tokens[ends[-1] - 1] - first) * about.frames_per_step
    return cuts, advance or num_frames  # the rules allow no end at 0 seconds, but progress does not rest on them
