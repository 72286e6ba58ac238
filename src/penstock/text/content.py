"""Content of a message: text, or parts of text, images and sounds in their order.

    [{"type": "image", "source": ImageSource(...)}, {"type": "text", "text": "What is it?"}]

`take_images` moves the sources out, and leaves `ImageSource.part`, which chat templates render.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.dataclass import dataclass

if TYPE_CHECKING:  # the process that renders chat templates has no need of it
    from penstock.api.request import MediaKind

Content: TypeAlias = str | list[dict[str, Any]]
ITEM_TYPES: "dict[MediaKind, str]" = {"image": "image", "sound": "audio"}
"""The type of the part of a content that stands for an item, by its kind."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image, or a sound, as a caller sent it."""

    field: str
    """The field that holds it, for errors."""
    data: str | bytes
    """A URL, base64 text, or the bytes of a file."""
    is_url: bool = False
    is_low: bool = False
    """Whether few tokens suffice (`detail: low`)."""
    is_own: bool = False
    """Whether it comes from this process: then its file may have any size."""
    is_sound: bool = False

    @property
    def kind(self) -> "MediaKind":
        return "sound" if self.is_sound else "image"

    @property
    def part(self) -> dict[str, Any]:
        """The part of a content that chat templates render. Some know a sound by its type, some by its field."""
        return {"type": ITEM_TYPES[self.kind]} | ({"audio": ""} if self.is_sound else {})


def content_of(parts: Iterable[str | ImageSource], separator: str) -> Content:
    """The content of these parts; text alone is joined by `separator`."""
    listed = list(parts)
    texts = [part for part in listed if isinstance(part, str)]
    if len(texts) == len(listed):
        return separator.join(texts)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {**part.part, "source": part}
        for part in listed
        if part
    ]


def joined(first: Content, second: Content, separator: str) -> Content:
    """One content after another. `separator` stands between two texts, both not empty."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{separator}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(content: Content) -> str:
    """The text of a content, without its images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def take_images(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Messages with `ImageSource.part` in place of each image or sound, and these in their order."""
    sources: list[ImageSource] = []
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any("source" in part for part in content):
            sources += (part["source"] for part in content if "source" in part)
            content = [part["source"].part if "source" in part else part for part in content]
            message = {**message, "content": content}
        made.append(message)
    return made, sources


def items_as_text(messages: Sequence[dict[str, Any]], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages with text in place of images or sounds, by the type of their parts; text alone is joined."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list) or not any(part["type"] in texts for part in content):
            return message
        parts = [{"type": "text", "text": texts[part["type"]]} if part["type"] in texts else part for part in content]
        return {**message, "content": text_of(parts) if all(part["type"] == "text" for part in parts) else parts}

    return [changed(message) for message in messages]


def images_after_tools(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose tool results have no images: a user's message after them has these, for chat templates that
    render results as text."""
    made: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and not isinstance(message["content"], str):
            images += (part for part in message["content"] if part["type"] != "text")
            message = {**message, "content": text_of(message["content"])}
        elif message["role"] != "tool" and images:
            if message["role"] == "user":
                message = {**message, "content": joined(images, message["content"], "")}
            else:
                made.append({"role": "user", "content": images})
            images = []
        made.append(message)
    return [*made, {"role": "user", "content": images}] if images else made
