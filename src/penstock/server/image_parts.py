"""Images, sounds and other parts that are no text, in the bodies of all dialects."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat
from penstock.text.content import ImageSource

SOUNDS = ("input_audio", "audio_url", "audio")
"""Types of parts with sounds."""
_DETAILS = (None, "auto", "low", "high", "original")


def image_at_url(given: Any, detail: Any, field: str) -> ImageSource:
    """OpenAI's image: a URL, or an object with `url` and `detail`.

    Raises:
        InvalidRequestError: it has no URL, or an unknown detail.
    """
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if not isinstance(given, str) or not given:
        raise InvalidRequestError(f"{field}: an image needs image_url, as data:image/png;base64,...", field)
    if detail not in _DETAILS:
        raise InvalidRequestError(f"{field}: detail must be auto, low, high or original, not {detail!r:.50}", field)
    return ImageSource(field, given, is_url=True, is_low=detail == "low")


def image_in_source(source: Any, field: str) -> ImageSource:
    """Anthropic's image: base64 data, or a URL.

    Raises:
        InvalidRequestError: it is of another kind, or has no content.
    """
    kind = source.get("type") if isinstance(source, Mapping) else None
    name = {"base64": "data", "url": "url"}.get(str(kind))
    if name is None:
        raise InvalidRequestError(
            f"{field}.source: an image's source must be of type base64 or url; files are not kept here",
            f"{field}.source",
        )
    content = source.get(name)
    if not isinstance(content, str) or not content:
        raise InvalidRequestError(f"{field}.source.{name}: this parameter is required", f"{field}.source.{name}")
    return ImageSource(f"{field}.source", content, is_url=kind == "url")


def sound_in(given: Any, field: str) -> ImageSource:
    """OpenAI's sound: an object with base64 `data`. Its `format` has no effect: the content says what it is.

    Raises:
        InvalidRequestError: it has no data.
    """
    data = given.get("data") if isinstance(given, Mapping) else None
    if not isinstance(data, str) or not data:
        raise InvalidRequestError(f'{field}: a sound needs {{"data": base64, "format": "wav"}}', field)
    return ImageSource(field, data, is_url=data[:5].lower() == "data:", is_sound=True)


def sound_at_url(given: Any, field: str) -> ImageSource:
    """vLLM's sound: a data URL, or an object with `url`.

    Raises:
        InvalidRequestError: it has no URL.
    """
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(f"{field}: a sound needs audio_url, as data:audio/wav;base64,...", field)
    return ImageSource(field, url, is_url=True, is_sound=True)


def not_supported(kind: str, field: str, known: ChatFormat) -> InvalidRequestError:
    """The error for a part that the model cannot read."""
    takes = "this checkpoint takes text only"
    media = [name for name, is_taken in (("images", known.takes_images), ("sounds", known.takes_sounds)) if is_taken]
    if media:
        takes = f"this model takes text and {' and '.join(media)}"
    if kind in SOUNDS and known.takes_sounds:
        takes = "sounds belong in messages of the user, as input_audio"
    elif kind in SOUNDS:
        takes += known.encoder_note
    return InvalidRequestError(f"{field}: {kind} is not supported here: {takes}", field)
