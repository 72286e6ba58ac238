"""A transcript in the formats of OpenAI's API."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.frontend.audio.transcription import Segment, Transcript
from penstock.server.openai.answers import top_logprob
from penstock.server.openai.schema import TopLogprob
from penstock.text.tokenizer import Tokenizer

MEDIA_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
"""Formats of a transcript."""


def token_logprobs(segments: Sequence[Segment], tokenizer: Tokenizer, end: int) -> list[TopLogprob]:
    """The log-probabilities of the tokens of text, which are those below `end`."""
    return [
        top_logprob(tokenizer, token, logprob)
        for segment in segments
        for token, logprob in zip(segment.tokens, segment.token_logprobs, strict=True)
        if token < end
    ]


def render(
    transcript: Transcript,
    form: str,
    *,
    task: str,
    temperature: float,
    with_segments: bool,
    logprobs: list[TopLogprob] | None = None,
) -> bytes:
    """The body of an answer in one of the formats; only `json` has `logprobs`."""
    if form == "text":
        return (transcript.text + "\n").encode()
    if form == "srt":
        return _srt(transcript.segments).encode()
    if form == "vtt":
        return _vtt(transcript.segments).encode()
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    if form == "json":
        found = {} if logprobs is None else {"logprobs": logprobs}
        return msgspec.json.encode({"text": transcript.text, **found, "usage": usage})
    made: dict[str, Any] = {
        "task": task,
        "language": transcript.language if task == "transcribe" else "en",
        "duration": transcript.seconds,
        "text": transcript.text,
        "usage": usage,
    }
    if with_segments:
        made["segments"] = [_segment(index, segment, temperature) for index, segment in enumerate(transcript.segments)]
    return msgspec.json.encode(made)


def _segment(index: int, segment: Segment, temperature: float) -> dict[str, Any]:
    return {
        "id": index,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{index}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment)}\n\n"
        for index, segment in enumerate(segments, 1)
    )


def _vtt(segments: Sequence[Segment]) -> str:
    cues = (f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_line(segment)}\n\n" for segment in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    """The text of a cue: an arrow would end it."""
    return segment.text.strip().replace("-->", "->").replace("\n", " ")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
