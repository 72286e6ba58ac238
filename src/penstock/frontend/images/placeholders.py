"""Tokens that stand for images and sounds in a prompt.

rendered text ──with_placeholders──> text with one placeholder each ──tokenizer──> ids ──place──> ids, images
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from penstock.api.request import Image, MediaKind
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, InvalidRequestError
from penstock.frontend.images.reader import Part, Picture
from penstock.frontend.input_processor import ImagePrompt
from penstock.text.content import ITEM_TYPES, ImageSource, items_as_text
from penstock.text.tokenizer import Tokenizer

Message = dict[str, Any]


@dataclass(slots=True)
class Expansion:
    """Tokens of one image, and the beginnings of its parts among them."""

    token_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class MediaTokens(ABC):
    """The tokens of one kind of media for one model."""

    kind: MediaKind = "image"

    def __init__(self, placeholder: int, tokenizer: Tokenizer) -> None:
        """
        Args:
            placeholder: the token of one feature.

        Raises:
            CheckpointError: the tokenizer lacks it.
        """
        self._tokenizer, self.id_of_placeholder = tokenizer, placeholder
        self.placeholder = self._text(placeholder)
        self.marker = self.placeholder
        """The text that the chat template writes for an image."""
        self.in_text = self.placeholder
        """The placeholder, with what the processor writes around it."""
        self.in_message: str | None = None
        """What stands for an item in the text of a message, for a chat template that does not know its kind; None: the
        template knows it."""

    @property
    def bare_marker(self) -> str:
        """The text that stands for an image in a prompt without a chat template."""
        return self.marker

    @abstractmethod
    def expanded(self, picture: Picture) -> Expansion:
        """The tokens of an image."""

    @abstractmethod
    def image(self, part: Part, start: int) -> Image:
        """A part of an image whose first token is at `start`."""

    def _text(self, token: int) -> str:
        text = self._tokenizer.backend.id_to_token(token)
        if text is None:
            raise CheckpointError(f"the tokenizer has no token {token}, which stands for {self.kind}s in config.json")
        return text


class Placeholders:
    """The tokens of all media that one model takes. Those of each kind stand for its images in their order."""

    def __init__(self, kinds: Sequence[MediaTokens]) -> None:
        self._kinds = {tokens.kind: tokens for tokens in kinds}
        self._by_id = {tokens.id_of_placeholder: tokens for tokens in kinds}
        self._all = " and ".join(f"{kind}s" for kind in self._kinds)

    def check_not_spelled(self, content: Any, param: str) -> None:
        """Refuse texts that spell a placeholder, as its token could not be told from an image's.

        Raises:
            InvalidRequestError: one does.
        """
        spelled = {text: kind for kind, tokens in self._kinds.items() for text in (tokens.marker, tokens.placeholder)}
        waiting = [content]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                for text, kind in spelled.items():
                    if text in value:
                        article = "an" if kind[0] in "aeiou" else "a"
                        raise InvalidRequestError(
                            f"{param}: a text has {text!r}, which stands for {article} {kind} in this model's "
                            f"prompts: beside {self._all}, leave it out",
                            param,
                        )
            elif isinstance(value, (Mapping, list, tuple)):
                waiting.extend(value.values() if isinstance(value, Mapping) else value)

    def spelled_out(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with text in place of the items of kinds that the chat template does not know."""
        texts = {
            ITEM_TYPES[kind]: tokens.in_message for kind, tokens in self._kinds.items() if tokens.in_message is not None
        }
        return items_as_text(messages, texts) if texts else list(messages)

    def are_rendered(self, text: str, pictures: Sequence[Picture]) -> bool:
        """Whether a rendered conversation has a marker for each image."""
        wanted = Counter(picture.kind for picture in pictures)
        return all(text.count(tokens.marker) == wanted[kind] for kind, tokens in self._kinds.items())

    def check_rendered(self, text: str, pictures: Sequence[Picture]) -> None:
        """
        Raises:
            InvalidRequestError: a rendered conversation has another number of images.
        """
        wanted = Counter(picture.kind for picture in pictures)
        for kind, tokens in self._kinds.items():
            found = text.count(tokens.marker)
            if found != wanted[kind]:
                raise InvalidRequestError(
                    f"messages: the model's chat template makes {found} placeholders of {wanted[kind]} {kind}s: put "
                    f"{kind}s in the user's messages, and leave {tokens.marker!r} out of texts",
                    "messages",
                )

    def with_placeholders(self, text: str) -> str:
        """The rendered prompt with the processor's tokens around each image, and one placeholder per image."""
        for tokens in self._kinds.values():
            if tokens.in_text != tokens.marker:
                text = text.replace(tokens.marker, tokens.in_text)
        return text

    def bare_prompt(self, parts: Sequence[str | ImageSource], param: str) -> str:
        """A prompt without a chat template, with a marker for each image.

        Raises:
            InvalidRequestError: a text spells a placeholder.
        """
        self.check_not_spelled([part for part in parts if isinstance(part, str)], param)
        return "".join(part if isinstance(part, str) else self._kinds[part.kind].bare_marker for part in parts)

    def expand_spans(
        self, spans: Sequence[tuple[int, int, int]], pictures: Sequence[Picture], param: str
    ) -> list[tuple[int, int, int]]:
        """Tokens with their positions in a text; those of an image have that of its placeholder. Raises as `place`."""
        self._check_number((token for token, _, _ in spans), pictures, param)
        made, left = list[tuple[int, int, int]](), self._in_order(pictures)
        for token, first, stop in spans:
            tokens = self._by_id.get(token)
            if tokens is None:
                made.append((token, first, stop))
            else:
                expansion = tokens.expanded(next(left[tokens.kind]))
                made += [(image_token, first, stop) for image_token in expansion.token_ids]
        return made

    def place(self, token_ids: Sequence[int], pictures: Sequence[Picture], param: str) -> ImagePrompt:
        """Expand the n-th placeholder of a kind to the tokens of the n-th picture of that kind.

        Raises:
            InvalidRequestError: there are more or fewer placeholders than pictures.
        """
        self._check_number(token_ids, pictures, param)
        left, made, images = self._in_order(pictures), list[int](), list[Image]()
        for token in token_ids:
            tokens = self._by_id.get(token)
            if tokens is None:
                made.append(token)
                continue
            picture = next(left[tokens.kind])
            expansion = tokens.expanded(picture)
            for part, start in zip(picture.parts, expansion.starts, strict=True):
                images.append(tokens.image(part, len(made) + start))
            made += expansion.token_ids
        return ImagePrompt(made, tuple(images))

    def _check_number(self, token_ids: Iterable[int], pictures: Sequence[Picture], param: str) -> None:
        """
        Raises:
            InvalidRequestError: there are more or fewer placeholders of a kind than pictures.
        """
        found = Counter(self._by_id[token].kind for token in token_ids if token in self._by_id)
        given = Counter(picture.kind for picture in pictures)
        for kind, tokens in self._kinds.items():
            if found[kind] != given[kind]:
                raise InvalidRequestError(
                    f"{param}: the prompt has {found[kind]} placeholders {tokens.placeholder!r} for {given[kind]} "
                    f"{kind}s",
                    param,
                )

    def _in_order(self, pictures: Sequence[Picture]) -> dict[MediaKind, Iterator[Picture]]:
        """The pictures of each kind."""
        return {kind: iter([picture for picture in pictures if picture.kind == kind]) for kind in self._kinds}
