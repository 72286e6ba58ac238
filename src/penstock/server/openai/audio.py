"""OpenAI's transcriptions and translations of audio."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field, PrivateAttr, ValidationError
from starlette.responses import Response

from penstock.errors import InvalidRequestError, PenstockError, WrongTaskError
from penstock.frontend.audio.transcription import Segment, Transcription, TranscriptOptions, check_task
from penstock.frontend.large_work import LargeWork
from penstock.server.body import Body, IgnoredValues
from penstock.server.body_route import CheckedRequest, record_ignored
from penstock.server.call_context import context_of
from penstock.server.dialect import Call, CallOf
from penstock.server.disconnect import cancelled_on_disconnect
from penstock.server.errors import reply_to_error
from penstock.server.openai.multipart import Form, parse_form
from penstock.server.openai.schema import TopLogprob
from penstock.server.openai.transcripts import MEDIA_TYPES, render, token_logprobs
from penstock.server.openai.windows import transcribe_windows
from penstock.server.openai_errors import ERRORS, shape
from penstock.server.streams import EventStream, Frame

BodyT = TypeVar("BodyT", bound="TranslationBody")


class TranslationBody(Body):
    """The form of `POST /v1/audio/translations`."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})

    model: str | None = Field(None, description="Default: the served model.")
    prompt: str | None = Field(
        None, description="Text that may come before, for its style and spelling; at most half the context."
    )
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = Field(
        None, description="Default: json."
    )
    temperature: float | None = Field(None, ge=0, le=1, description="Default: 0; it is never raised automatically.")
    seed: int | None = Field(None, description="For temperatures above 0.")
    _file: bytes = PrivateAttr(b"")


class TranscriptionBody(TranslationBody):
    """The form of `POST /v1/audio/transcriptions`."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        "chunking_strategy": ("auto",),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
        "keywords": ([],),
        "languages": ([],),
    }

    language: str | None = Field(None, description="Code of the language, such as de. Default: the model tells.")
    stream: bool | None = Field(
        None, description="Send the text of each window of 30 s as an event; for the formats json and text."
    )
    include: list[Literal["logprobs"]] | None = Field(
        None, description="logprobs: the log-probability of each token of the text, in the format json."
    )
    timestamp_granularities: list[Literal["segment"]] | None = Field(
        None, description="For verbose_json, which has segments by default; times of words are not computed."
    )


class FormRoute(APIRoute):
    """A route that takes a form with a file, and validates it before FastAPI calls the route's function.

    Raises:
        ClientGoneError: the client has disconnected while its form waited to be read.
        InvalidRequestError: the body is no such form.
        RequestValidationError: a field does not match the schema.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind = TranslationBody if self.path.endswith("translations") else TranscriptionBody

        async def handle_form(request: Request) -> Response:
            raw, content_type = await request.body(), request.headers.get("content-type", "")
            work: LargeWork = request.app.state.large_work
            with cancelled_on_disconnect(request.receive):
                body = await work.run(
                    len(raw), lambda: _read(kind, content_type, raw), context_of(request.scope).caller.tenant
                )
            record_ignored(body, request)
            return await handle(CheckedRequest(request, raw, body))

        return handle_form


def _read(kind: type[BodyT], content_type: str, raw: bytes) -> BodyT:
    """A form's fields and its file."""
    form = parse_form(content_type, raw)
    content = form.files.pop("file", None)
    if content is None:
        raise InvalidRequestError("file: the form has no file of this name, with the audio", "file")
    if form.files:
        name = next(iter(form.files))
        raise InvalidRequestError(f"{name[:40]!r} is a file; only `file` is one", name)
    try:
        body = kind.model_validate(_values(form))
    except ValidationError as error:
        found = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(found) from None
    body._file = content
    return body


def _checked(request: Request, kind: type[BodyT]) -> BodyT:
    """The body that `FormRoute` has read."""
    assert isinstance(request, CheckedRequest)
    assert isinstance(request.checked, kind)
    return request.checked


router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=FormRoute)


def _described(body: type[Body]) -> dict[str, Any]:
    """The form in the OpenAPI page."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


_FORMS = ("application/json", "text/plain", "text/vtt", "application/x-subrip", "text/event-stream")
_TRANSCRIPT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The transcript in the format that was asked for.",
        "content": {kind: {"schema": {"type": "object" if "json" in kind else "string"}} for kind in _FORMS},
    }
}


@router.post(
    "/audio/transcriptions",
    response_class=Response,
    responses={**_TRANSCRIPT, **ERRORS},
    openapi_extra=_described(TranscriptionBody),
)
async def transcriptions(request: Request, call: CallOf) -> Response:
    """Transcribe a sound in its own language."""
    body = _checked(request, TranscriptionBody)
    content = _audio_of(call, body)
    _check_stream(body)
    transcription = await _transcription(call, body, content, body.language, translate=False)
    if not body.stream:
        return await _whole(call, body, transcription, "transcribe")
    events = _events(call, body, transcription)
    with call.connected():
        first = await anext(events)  # an error of the first window is the answer's status
    return EventStream(_after(first, events), Frame.SERVER_SENT_EVENTS, call.abort, {}, None)


@router.post(
    "/audio/translations",
    response_class=Response,
    responses={**_TRANSCRIPT, **ERRORS},
    openapi_extra=_described(TranslationBody),
)
async def translations(request: Request, call: CallOf) -> Response:
    """Translate a sound into English."""
    body = _checked(request, TranslationBody)
    content = _audio_of(call, body)
    transcription = await _transcription(call, body, content, None, translate=True)
    return await _whole(call, body, transcription, "translate")


def _audio_of(call: Call, body: TranslationBody) -> bytes:
    """The file of a form that the model takes."""
    if call.engine.sounds is None:
        raise WrongTaskError(f"{call.model_name} does not transcribe audio: serve a Whisper model", "model")
    call.choose_model(body.model)
    return body._file


def _values(form: Form) -> dict[str, Any]:
    """The fields as a JSON body would have them: numbers and booleans, lists (`name[]`) and objects (`name[key]`)."""
    made: dict[str, Any] = {}
    for name, values in form.fields.items():
        outer, bracket, key = name.removesuffix("]").partition("[")
        if bracket and name.endswith("]"):
            made[outer] = {key: values} if key else values  # no field is an object, so that one key shows what it is
        elif len(values) > 1:
            raise InvalidRequestError(f"{name[:40]!r} is in the form {len(values)} times", name)
        else:
            made[name] = _value(name, values[0])
    return made


_NUMBERS = {"temperature": float, "seed": int}


def _value(name: str, text: str) -> object:
    if name == "stream":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    try:
        return _NUMBERS[name](text) if name in _NUMBERS else text
    except ValueError:
        return text  # the schema refuses it by name


def _check_stream(body: TranscriptionBody) -> None:
    if body.stream and body.response_format not in (None, "json", "text"):
        raise InvalidRequestError(
            f"stream sends text alone: leave it out for response_format {body.response_format}", "stream"
        )
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise InvalidRequestError(
            "timestamp_granularities goes with response_format verbose_json", "timestamp_granularities"
        )
    if body.include and body.response_format not in (None, "json"):
        raise InvalidRequestError("include goes with response_format json", "include")


async def _transcription(
    call: Call, body: TranslationBody, content: bytes, language: str | None, *, translate: bool
) -> Transcription:
    form = body.response_format or "json"
    engine, sounds = call.engine, call.engine.sounds
    assert sounds is not None
    options = TranscriptOptions(
        language=language,
        translate=translate,
        prompt=body.prompt or "",
        temperature=body.temperature or 0.0,
        seed=body.seed,
        has_segments=form in ("verbose_json", "srt", "vtt"),
        measures=form == "verbose_json",
        token_logprobs=isinstance(body, TranscriptionBody) and bool(body.include),
    )
    check_task(sounds.about, options)
    tokenizer = engine.prompts.need_tokenizer()
    with call.connected():
        sound = await sounds.read(content, "file", call.tenant)
    call.hold_bytes(sound.features.nbytes)
    return Transcription(
        sound,
        sounds.about,
        engine.info.max_model_len,
        options,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
    )


async def _whole(call: Call, body: TranslationBody, transcription: Transcription, task: str) -> Response:
    async for _ in transcribe_windows(call, transcription, watched=True):
        pass
    form = body.response_format or "json"
    made = render(
        transcription.transcript,
        form,
        task=task,
        temperature=body.temperature or 0.0,
        with_segments=form == "verbose_json",
        logprobs=_logprobs(call, body, transcription.transcript.segments),
    )
    return Response(made, media_type=MEDIA_TYPES[form])


def _logprobs(call: Call, body: TranslationBody, segments: Sequence[Segment]) -> list[TopLogprob] | None:
    """The log-probabilities of the tokens, if they were asked for."""
    if not (isinstance(body, TranscriptionBody) and body.include):
        return None
    assert call.engine.sounds is not None
    return token_logprobs(segments, call.engine.prompts.need_tokenizer(), call.engine.sounds.about.end)


async def _events(call: Call, body: TranscriptionBody, transcription: Transcription) -> AsyncIterator[bytes]:
    """A delta for each window, then the whole text; an error is the last event."""
    has_begun = False
    try:
        async for made in transcribe_windows(call, transcription, watched=False):
            delta = "".join(piece.text for piece in made)
            delta = delta if has_begun else delta.lstrip()
            found = _logprobs(call, body, made)
            yield _event({"type": "transcript.text.delta", "delta": delta, **_field("logprobs", found)})
            has_begun = True
        transcript = transcription.transcript
        found = _logprobs(call, body, transcript.segments)
        yield _event({"type": "transcript.text.done", "text": transcript.text, **_field("logprobs", found)})
    except PenstockError as error:
        if not has_begun:
            raise
        yield _event(shape(reply_to_error(error))[1])


def _field(name: str, value: object) -> dict[str, object]:
    """A field of a JSON object; none for None."""
    return {} if value is None else {name: value}


async def _after(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in events:
        yield event


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
