"""Images and other parts that are no text, in the bodies of all dialects."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat
from penstock.text.content import ImageSource

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


def not_supported(kind: str, field: str, known: ChatFormat) -> InvalidRequestError:
    """The error for a part that the model cannot read."""
    takes = "this model takes text and images" if known.takes_images else "this checkpoint takes text only"
    return InvalidRequestError(f"{field}: {kind} is not supported here: {takes}", field)
