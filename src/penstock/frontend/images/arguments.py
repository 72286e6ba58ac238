"""Images in arguments of the Python API: PIL images, paths, bytes and data URLs."""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.text.content import ImageSource

_KEYS = ("image", "image_url", "url", "path", "base64")
"""Fields of a part that may hold an image, as in `transformers`, and in OpenAI's API."""


def with_sources(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with an `ImageSource` for each image of their content.

    Raises:
        InvalidRequestError: a part names an image that cannot be read.
    """
    made = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = [_part(part, f"messages[{index}].content[{place}]") for place, part in enumerate(content)]
            message = {**message, "content": parts}
        made.append(dict(message))
    return made


def _part(part: Any, field: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url", "input_image"):
        return part
    key = next((key for key in _KEYS if part.get(key) is not None), None)
    if key is None:
        raise InvalidRequestError(f'{field}: give the image, as {{"type": "image", "image": "photo.jpg"}}', field)
    value: Any = part[key]
    detail = part.get("detail")
    if isinstance(value, Mapping):  # OpenAI's object
        value, detail = value.get("url"), value.get("detail", detail)
    if key == "base64" and isinstance(value, str):
        source = ImageSource(field, value, is_low=detail == "low", is_own=True)
    else:
        source = source_of(value, field, is_low=detail == "low")
    return {"type": "image", "source": source}


def source_of(value: Any, field: str, *, is_low: bool = False) -> ImageSource:
    """The source of a PIL image, a path, the bytes of a file, or a URL.

    Raises:
        InvalidRequestError: it is something else, or there is no such file.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ImageSource(field, bytes(value), is_low=is_low, is_own=True)
    if isinstance(value, str) and value.startswith(("data:", "https://", "http://")):
        return ImageSource(field, value, is_url=True, is_low=is_low, is_own=True)
    if isinstance(value, (str, os.PathLike)):
        try:
            return ImageSource(field, Path(value).expanduser().read_bytes(), is_low=is_low, is_own=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequestError(
                f"{field}: the image {str(value)[:200]!r} cannot be read: {error}", field
            ) from None
    if hasattr(value, "convert") and hasattr(value, "getexif"):
        return ImageSource(field, _bitmap(value), is_low=is_low, is_own=True)
    raise InvalidRequestError(
        f"{field}: an image must be a PIL image, a path, bytes or a data URL, not {type(value).__name__}", field
    )


def _bitmap(image: Any) -> bytes:
    """A PIL image as a file without loss."""
    from penstock.frontend.images.pictures import upright_rgb  # here: it imports Pillow, which the caller has

    buffer = io.BytesIO()
    upright_rgb(image, image.getexif().get(0x0112, 1)).save(buffer, "BMP")
    return buffer.getvalue()


def sources_of_prompt(prompt: Mapping[str, Any]) -> tuple[str, list[ImageSource]]:
    """The text and the images of a prompt such as `{"prompt": text, "multi_modal_data": {"image": images}}`.

    Raises:
        InvalidRequestError: it has another form.
    """
    text, data = prompt.get("prompt"), prompt.get("multi_modal_data") or {}
    others = [*(prompt.keys() - {"prompt", "multi_modal_data"}), *(data.keys() - {"image"})]
    if not isinstance(text, str) or others:
        raise InvalidRequestError(
            'a prompt with images is {"prompt": text, "multi_modal_data": {"image": one or a list}}'
            + (f", without {', '.join(map(str, others))}" if others else ""),
            "prompts",
        )
    given = data.get("image", [])
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    return text, [source_of(image, f"multi_modal_data.image[{index}]") for index, image in enumerate(listed)]
