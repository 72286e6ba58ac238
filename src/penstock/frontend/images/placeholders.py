"""Tokens that stand for images or sounds in a prompt.

rendered text ──with_placeholders──> text with one placeholder each ──tokenizer──> ids ──place──> ids, images
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from penstock.api.request import Image
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, InvalidRequestError
from penstock.frontend.images.reader import Part, Picture
from penstock.frontend.input_processor import ImagePrompt
from penstock.text.content import ImageSource
from penstock.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Expansion:
    """Tokens of one image, and the beginnings of its parts among them."""

    token_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class Placeholders(ABC):
    """The tokens of images, or of sounds, for one model."""

    what = "image"
    """Its name in messages."""

    def __init__(self, placeholder: int, tokenizer: Tokenizer) -> None:
        """
        Args:
            placeholder: the token of one feature.

        Raises:
            CheckpointError: the tokenizer lacks it.
        """
        self._tokenizer, self._id_of_placeholder = tokenizer, placeholder
        self._placeholder = self._text(placeholder)
        self.marker = self._placeholder
        """The text that the chat template writes for an image."""
        self._in_text = self._placeholder

    @property
    def bare_marker(self) -> str:
        """The text that stands for an image in a prompt without a chat template."""
        return self.marker

    @abstractmethod
    def _expanded(self, picture: Picture) -> Expansion:
        """The tokens of an image."""

    @abstractmethod
    def _image(self, part: Part, start: int) -> Image:
        """A part of an image whose first token is at `start`."""

    def check_not_spelled(self, content: Any, param: str) -> None:
        """Refuse texts that spell a placeholder, as its token could not be told from an image's.

        Raises:
            InvalidRequestError: one does.
        """
        waiting = [content]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                for spelled in {self.marker, self._placeholder}:
                    if spelled in value:
                        raise InvalidRequestError(
                            f"{param}: a text has {spelled!r}, which stands for {self._article} in this model's "
                            f"prompts: beside {self.what}s, leave it out",
                            param,
                        )
            elif isinstance(value, (Mapping, list, tuple)):
                waiting.extend(value.values() if isinstance(value, Mapping) else value)

    @property
    def _article(self) -> str:
        return f"an {self.what}" if self.what[0] in "aeiou" else f"a {self.what}"

    def num_markers(self, text: str) -> int:
        return text.count(self.marker)

    def check_rendered(self, text: str, num_images: int) -> None:
        """
        Raises:
            InvalidRequestError: a rendered conversation has another number of images.
        """
        found = self.num_markers(text)
        if found != num_images:
            raise InvalidRequestError(
                f"messages: the model's chat template makes {found} placeholders of {num_images} {self.what}s: put "
                f"{self.what}s in the user's messages, and leave {self.marker!r} out of texts",
                "messages",
            )

    def with_placeholders(self, text: str) -> str:
        """The rendered prompt with the processor's tokens around each image, and one placeholder per image."""
        return text if self._in_text == self.marker else text.replace(self.marker, self._in_text)

    def bare_prompt(self, parts: Sequence[str | ImageSource], param: str) -> str:
        """A prompt without a chat template, with a marker for each image.

        Raises:
            InvalidRequestError: a text spells a placeholder.
        """
        self.check_not_spelled([part for part in parts if isinstance(part, str)], param)
        return "".join(part if isinstance(part, str) else self.bare_marker for part in parts)

    def expand_spans(
        self, spans: Sequence[tuple[int, int, int]], pictures: Sequence[Picture]
    ) -> list[tuple[int, int, int]]:
        """Tokens with their positions in a text; those of an image have that of its placeholder."""
        made, left = [], iter(pictures)
        for token, first, stop in spans:
            if token == self._id_of_placeholder:
                made += [(image_token, first, stop) for image_token in self._expanded(next(left)).token_ids]
            else:
                made.append((token, first, stop))
        return made

    def place(self, token_ids: Sequence[int], pictures: Sequence[Picture], param: str) -> ImagePrompt:
        """Expand the n-th placeholder to the tokens of the n-th picture.

        Raises:
            InvalidRequestError: there are more or fewer placeholders than pictures.
        """
        found, made, images = 0, list[int](), list[Image]()
        for token in token_ids:
            if token != self._id_of_placeholder:
                made.append(token)
                continue
            if found < len(pictures):
                picture = pictures[found]
                expansion = self._expanded(picture)
                for part, start in zip(picture.parts, expansion.starts, strict=True):
                    images.append(self._image(part, len(made) + start))
                made += expansion.token_ids
            found += 1
        if found != len(pictures):
            raise InvalidRequestError(
                f"{param}: the prompt has {found} placeholders {self._placeholder!r} for {len(pictures)} {self.what}s",
                param,
            )
        return ImagePrompt(made, tuple(images))

    def _text(self, token: int) -> str:
        text = self._tokenizer.backend.id_to_token(token)
        if text is None:
            raise CheckpointError(f"the tokenizer has no token {token}, which stands for {self.what}s in config.json")
        return text
