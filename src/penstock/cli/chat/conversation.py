"""A chat's messages, as immutable data, and their file."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError

MAX_FILE_BYTES = 2**26
"""Maximum bytes of a file that `/load` reads."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """A message. The reasoning of an answer is shown and saved, but not sent with later questions."""

    role: str
    content: str
    reasoning: str = ""
    images: tuple[str, ...] = ()
    """Data URLs of the images that precede the text."""

    @property
    def parts(self) -> str | list[dict[str, Any]]:
        """Its content as in an OpenAI request."""
        if not self.images:
            return self.content
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return [*images, {"type": "text", "text": self.content}]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system message and the messages after it."""

    system: str = ""
    messages: tuple[Message, ...] = ()

    def prompt(self, question: Message) -> list[dict[str, Any]]:
        """The messages that ask a question."""
        opening = (Message("system", self.system),) if self.system else ()
        asked = (*opening, *self.messages, question)
        return [{"role": message.role, "content": message.parts} for message in asked]

    def with_turn(self, question: Message, answer: str, reasoning: str = "") -> "Conversation":
        """The conversation after a question and its answer."""
        return replace(self, messages=(*self.messages, question, Message("assistant", answer, reasoning)))

    def last_question(self) -> Message:
        """
        Raises:
            InvalidRequestError: nothing has been asked.
        """
        return self.messages[self._last_question()]

    def without_last_turn(self) -> "Conversation":
        """The conversation before its last question.

        Raises:
            InvalidRequestError: nothing has been asked.
        """
        return replace(self, messages=self.messages[: self._last_question()])

    def without_messages(self) -> "Conversation":
        """The system message alone."""
        return replace(self, messages=())

    def last_reasoning(self) -> str:
        """The reasoning of the last answer; empty if there was none."""
        answers = [message for message in self.messages if message.role == "assistant"]
        return answers[-1].reasoning if answers else ""

    def save(self, path: Path, model: str) -> None:
        """Write the conversation as JSON, in the form of an OpenAI request.

        Raises:
            InvalidRequestError: the file cannot be written.
        """
        opening = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": model, "messages": [*opening, *(_as_json(message) for message in self.messages)]}
        try:
            path.write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except (OSError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"the conversation cannot be saved: {error}") from None

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Read a file of `save`, or any JSON list of messages, or object that has one as `messages`.

        Raises:
            InvalidRequestError: the file cannot be read, or holds no conversation.
        """
        try:
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise InvalidRequestError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{path} cannot be read: {error}") from None
        listed = body.get("messages") if isinstance(body, dict) else body
        if not isinstance(listed, list):
            raise InvalidRequestError(f"{path} holds no conversation: it needs a list of messages")
        messages = tuple(_message(entry, f"{path}: message {number}") for number, entry in enumerate(listed, 1))
        if messages and messages[0].role == "system":
            return cls(messages[0].content, messages[1:])
        return cls("", messages)

    def _last_question(self) -> int:
        for index in reversed(range(len(self.messages))):
            if self.messages[index].role == "user":
                return index
        raise InvalidRequestError("the conversation has no question yet")


def _as_json(message: Message) -> dict[str, Any]:
    shown = {"role": message.role, "content": message.parts}
    return shown | ({"reasoning_content": message.reasoning} if message.reasoning else {})


def _message(entry: Any, place: str) -> Message:
    fields = entry if isinstance(entry, Mapping) else {}
    role, content, reasoning = fields.get("role"), fields.get("content"), fields.get("reasoning_content", "")
    images: tuple[str, ...] = ()
    if role == "user" and isinstance(content, list):
        content, images = _read_parts(content)
    if role not in ROLES or not isinstance(content, str) or not isinstance(reasoning, str):
        raise InvalidRequestError(
            f"{place} needs a role ({', '.join(ROLES)}) and a content that is text, or of a user images and text"
        )
    return Message(role, content, reasoning, images)


def _read_parts(parts: list[Any]) -> tuple[str | None, tuple[str, ...]]:
    """The text and the images of a content; None if it has other parts."""
    texts, images = [], []
    for part in parts:
        fields = part if isinstance(part, Mapping) else {}
        image = fields.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if isinstance(url, str):
            images.append(url)
        elif isinstance(fields.get("text"), str):
            texts.append(fields["text"])
        else:
            return None, ()
    return "\n".join(texts), tuple(images)
