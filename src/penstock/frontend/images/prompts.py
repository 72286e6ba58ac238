"""Prompts with images and sounds: reads these, renders the conversation, and puts their tokens in place."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.api.request import MediaKind
from penstock.config.engine_config import AudioConfig, ImageConfig
from penstock.dataclass import dataclass
from penstock.engine.info import EngineInfo
from penstock.errors import InvalidRequestError
from penstock.frontend.decoders import NUM_WORKERS
from penstock.frontend.images.placeholders import MediaTokens, Message, Placeholders
from penstock.frontend.images.reader import ImageReader, KeptPictures, MediaReader, Picture
from penstock.frontend.images.tokens import ImageTokens
from penstock.frontend.images.urls import ImageURLs
from penstock.frontend.input_processor import ImagePrompt
from penstock.frontend.large_work import LargeWork
from penstock.text.content import ImageSource, images_after_tools
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")
_MAX_WAITING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TakenKind:
    """How a model takes one kind of media."""

    tokens: MediaTokens
    reader: MediaReader
    option: str
    """Name of the option that sets `most`."""
    most: int
    """Maximum in one request."""


class Media:
    """What a model takes beside text."""

    def __init__(self, kinds: Sequence[TakenKind], note: str = "") -> None:
        """
        Args:
            note: what errors about other kinds say in the end.
        """
        self._kinds, self._note = {taken.tokens.kind: taken for taken in kinds}, note
        self.tokens = Placeholders([taken.tokens for taken in kinds])

    def check(self, sources: Sequence[ImageSource]) -> None:
        """
        Raises:
            InvalidRequestError: there are more of a kind than a request may have, or of one that the model lacks.
        """
        by_kind: dict[MediaKind, list[ImageSource]] = {}
        for source in sources:
            by_kind.setdefault(source.kind, []).append(source)
        for kind, given in by_kind.items():
            taken = self._kinds.get(kind)
            if taken is None:
                takes = " and ".join(["text", *(f"{known}s" for known in self._kinds)])
                field = given[0].field
                raise InvalidRequestError(f"{field}: this model takes {takes}, not {kind}s{self._note}", field)
            if len(given) > taken.most:
                field = given[taken.most].field
                raise InvalidRequestError(
                    f"{field}: the request has {len(given)} {kind}s; at most {taken.most} are taken ({taken.option})",
                    field,
                )

    def read(self, source: ImageSource, namespace: str = "", *, wants_pixels: bool = True) -> Picture:
        """Read a source that was checked. See `MediaReader.read`."""
        return self._kinds[source.kind].reader.read(source, namespace, wants_pixels=wants_pixels)

    def close(self) -> None:
        """Kill the processes that decode."""
        for taken in self._kinds.values():
            taken.reader.close()


def media_of(info: EngineInfo, tokenizer: Tokenizer | None, images: ImageConfig, sounds: AudioConfig) -> Media | None:
    """What a model takes beside text; None: nothing.

    Raises:
        CheckpointError: a token that the checkpoint's config names is missing.
    """
    if tokenizer is None:
        return None
    kinds, kept = list[TakenKind](), KeptPictures(images.image_cache_bytes)
    if info.image_input is not None:
        reader = ImageReader(info.image_input, images, kept)
        kinds.append(TakenKind(ImageTokens(info.image_input, tokenizer), reader, "max_images", images.max_images))
    if info.sound_input is not None:
        from penstock.frontend.audio.prompts import PromptSoundReader, SoundTokens  # here: few models hear

        heard = PromptSoundReader(info.sound_input, sounds, kept)
        kinds.append(TakenKind(SoundTokens(info.sound_input, tokenizer), heard, "max_sounds", sounds.max_sounds))
    return Media(kinds, info.encoder_note) if kinds else None


class ImagePrompts:
    """Prompts with images and sounds for one model; it reads without blocking the event loop."""

    def __init__(self, media: Media, urls: ImageURLs) -> None:
        """
        Args:
            urls: from which images may be fetched.
        """
        self.tokens = media.tokens
        self._media, self._urls = media, urls
        self._work = LargeWork(_MAX_WAITING_BYTES, num_threads=NUM_WORKERS)

    async def read(
        self,
        sources: Sequence[ImageSource],
        tenant: str = "",
        namespace: str = "",
        *,
        wants_pixels: bool = True,
        hold: Callable[[int], None] = lambda _: None,
    ) -> list[Picture]:
        """Read images; tenants take turns.

        Args:
            namespace: see `ImageReader.read`, as `wants_pixels`.
            hold: counts the bytes of each picture.

        Raises:
            InvalidRequestError: there are too many, or one is refused.
        """
        self._media.check(sources)

        async def read(source: ImageSource) -> Picture:
            picture = await self._read(source, tenant, namespace, wants_pixels=wants_pixels)
            hold(picture.num_bytes)
            return picture

        reading = [asyncio.ensure_future(read(source)) for source in sources]
        try:
            return await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()

    async def _read(self, source: ImageSource, tenant: str, namespace: str, *, wants_pixels: bool) -> Picture:
        is_fetched = source.is_url and not source.is_sound
        if is_fetched and isinstance(source.data, str) and source.data[:5].lower() != "data:":
            source = replace(source, data=await self._urls.fetch(source.data, source.field), is_url=False)
        return await self._work.run(
            len(source.data), lambda: self._media.read(source, namespace, wants_pixels=wants_pixels), tenant
        )

    async def bare_prompt(
        self,
        parts: Sequence[str | ImageSource],
        pictures: Sequence[Picture],
        encode: Callable[[str], Awaitable[list[int]]],
        param: str,
    ) -> ImagePrompt:
        """The prompt of texts and images without a chat template.

        Raises:
            InvalidRequestError: a text spells a placeholder.
        """
        text = self.tokens.with_placeholders(self.tokens.bare_prompt(parts, param))
        return self.tokens.place(await encode(text), pictures, param)

    async def render(
        self,
        messages: Sequence[Message],
        pictures: Sequence[Picture],
        render: Callable[[list[Message]], Awaitable[str]],
    ) -> str:
        """The text of a conversation's prompt, with one placeholder for each image.

        Args:
            messages: with `ImageSource.part` for each image.
            render: renders messages with the chat template.

        Raises:
            InvalidRequestError: a text spells a placeholder, or the chat template renders fewer images.
        """
        self.tokens.check_not_spelled([message.get("content") for message in messages], "messages")
        messages = self.tokens.spelled_out(messages)
        text = await render(messages)
        if not self.tokens.are_rendered(text, pictures):
            text = await render(images_after_tools(messages))
            self.tokens.check_rendered(text, pictures)
        return self.tokens.with_placeholders(text)

    def close(self) -> None:
        """Kill the processes that decode."""
        self._media.close()
        self._work.close()


class OfflineImages:
    """As `ImagePrompts`, for callers that wait."""

    def __init__(self, media: Media) -> None:
        self.tokens = media.tokens
        self._media = media

    def read(self, sources: Sequence[ImageSource]) -> list[Picture]:
        """Read images. Raises as `ImagePrompts.read`."""
        self._media.check(sources)
        return [self._media.read(source) for source in sources]

    def render(
        self, messages: Sequence[Message], pictures: Sequence[Picture], render: Callable[[list[Message]], str]
    ) -> str:
        """The text of a conversation's prompt. See `ImagePrompts.render`."""
        self.tokens.check_not_spelled([message.get("content") for message in messages], "messages")
        messages = self.tokens.spelled_out(messages)
        text = render(messages)
        if not self.tokens.are_rendered(text, pictures):
            text = render(images_after_tools(messages))
            self.tokens.check_rendered(text, pictures)
        return self.tokens.with_placeholders(text)

    def close(self) -> None:
        """Kill the processes that decode."""
        self._media.close()
