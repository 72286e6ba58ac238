"""Images and sounds in arguments of the Python API: PIL images, samples, paths, bytes and data URLs."""

import io
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.audio_input import SAMPLE_RATE
from penstock.errors import InvalidRequestError
from penstock.text.content import ImageSource

_KEYS = ("image", "image_url", "url", "path", "base64")
"""Fields of a part that may hold an image, as in `transformers`, and in OpenAI's API."""
_SOUND_KEYS = ("audio", "input_audio", "audio_url", "url", "path", "base64")
"""Fields of a part that may hold a sound."""


def with_sources(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with an `ImageSource` for each image and each sound of their content.

    Raises:
        InvalidRequestError: a part names an image or a sound that cannot be read.
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
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("audio", "audio_url", "input_audio"):
        source = _sound(part, field)
    elif kind in ("image", "image_url", "input_image"):
        source = _image(part, field)
    else:
        return part
    return {**source.part, "source": source}


def _image(part: Mapping[str, Any], field: str) -> ImageSource:
    key = next((key for key in _KEYS if part.get(key) is not None), None)
    if key is None:
        raise InvalidRequestError(f'{field}: give the image, as {{"type": "image", "image": "photo.jpg"}}', field)
    value: Any = part[key]
    detail = part.get("detail")
    if isinstance(value, Mapping):  # OpenAI's object
        value, detail = value.get("url"), value.get("detail", detail)
    if key == "base64" and isinstance(value, str):
        return ImageSource(field, value, is_low=detail == "low", is_own=True)
    return source_of(value, field, is_low=detail == "low")


def _sound(part: Mapping[str, Any], field: str) -> ImageSource:
    key = next((key for key in _SOUND_KEYS if part.get(key) is not None), None)
    if key is None:
        raise InvalidRequestError(f'{field}: give the sound, as {{"type": "audio", "audio": "talk.wav"}}', field)
    value: Any = part[key]
    if isinstance(value, Mapping):  # OpenAI's object, or vLLM's
        data = value.get("data")
        key, value = ("url", value.get("url")) if data is None else ("base64", data)
    if key == "base64" and isinstance(value, str):
        is_url = value[:5].lower() == "data:"
        return ImageSource(field, value, is_url=is_url, is_own=True, is_sound=True)
    return sound_of(value, field)


def sound_of(value: Any, field: str) -> ImageSource:
    """The source of a path, the bytes of a file, a URL, or samples: an array, or an array and its rate.

    Raises:
        InvalidRequestError: it is something else, or there is no such file.
    """
    samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, SAMPLE_RATE)
    if isinstance(samples, np.ndarray):
        return ImageSource(field, _wav(samples, rate, field), is_own=True, is_sound=True)
    if isinstance(value, (bytes, bytearray, memoryview, str, os.PathLike)):
        return replace(source_of(value, field, what="sound"), is_sound=True)
    raise InvalidRequestError(
        f"{field}: a sound must be a path, bytes, a data URL, or an array and its rate, not {type(value).__name__}",
        field,
    )


def _wav(samples: NDArray[Any], rate: Any, field: str) -> bytes:
    """Samples [any] as a WAV file of floats."""
    is_rate = isinstance(rate, (int, np.integer)) and 0 < rate < 2**31
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating) or not is_rate:
        raise InvalidRequestError(
            f"{field}: samples must be an array of floats with one axis, and its rate an integer", field
        )
    with np.errstate(over="ignore"):  # infinite samples are refused by the reader
        data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, int(rate), 4 * int(rate), 4, 32)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", len(head) + len(data)) + head + data


def source_of(value: Any, field: str, *, is_low: bool = False, what: str = "image") -> ImageSource:
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
                f"{field}: the {what} {str(value)[:200]!r} cannot be read: {error}", field
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
    """The text, and the images or sounds, of a prompt: `{"prompt": text, "multi_modal_data": {"image": images}}`.

    Raises:
        InvalidRequestError: it has another form.
    """
    text, data = prompt.get("prompt"), prompt.get("multi_modal_data") or {}
    others = [*(prompt.keys() - {"prompt", "multi_modal_data"}), *(data.keys() - _READERS.keys())]
    if not isinstance(text, str) or others:
        raise InvalidRequestError(
            'a prompt with images is {"prompt": text, "multi_modal_data": {"image": one or a list}}, or with sounds '
            '{"audio": ...}' + (f", without {', '.join(map(str, others))}" if others else ""),
            "prompts",
        )
    sources = []
    for kind, given in data.items():
        listed = list(given) if isinstance(given, list) or (isinstance(given, tuple) and kind == "image") else [given]
        sources += [_READERS[kind](one, f"multi_modal_data.{kind}[{index}]") for index, one in enumerate(listed)]
    return text, sources


_READERS: dict[str, Callable[[Any, str], ImageSource]] = {"image": source_of, "audio": sound_of}
"""By the key of `multi_modal_data`."""
