"""Prompts with images: reads the images, renders the conversation, and puts their tokens in place."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from penstock.config.engine_config import ImageConfig
from penstock.config.image_input import ImageInput
from penstock.errors import InvalidRequestError
from penstock.frontend.decoders import NUM_WORKERS
from penstock.frontend.images.reader import ImageReader, Picture
from penstock.frontend.images.tokens import ImageTokens
from penstock.frontend.images.urls import ImageURLs
from penstock.frontend.input_processor import ImagePrompt
from penstock.frontend.large_work import LargeWork
from penstock.text.content import ImageSource, images_after_tools
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")
Message = dict[str, Any]
_MAX_WAITING_BYTES = 64 * 2**20


def check_number(sources: Sequence[ImageSource], limits: ImageConfig) -> None:
    """
    Raises:
        InvalidRequestError: there are more images than a request may have.
    """
    if len(sources) > limits.max_images:
        field = sources[limits.max_images].field
        raise InvalidRequestError(
            f"{field}: the request has {len(sources)} images; at most {limits.max_images} are taken (max_images)", field
        )


class ImagePrompts:
    """Prompts with images for one model; it reads without blocking the event loop."""

    def __init__(
        self, image_input: ImageInput, tokenizer: Tokenizer, limits: ImageConfig, urls: ImageURLs | None = None
    ) -> None:
        """
        Args:
            urls: None: no image is fetched.

        Raises:
            CheckpointError: a token that the checkpoint's config names is missing.
        """
        self.tokens = ImageTokens(image_input, tokenizer)
        self._limits = limits
        self._reader = ImageReader(image_input, limits)
        self._urls = urls or ImageURLs((), limits.max_image_bytes)
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
        check_number(sources, self._limits)

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
        if source.is_url and isinstance(source.data, str) and source.data[:5].lower() != "data:":
            source = replace(source, data=await self._urls.fetch(source.data, source.field), is_url=False)
        return await self._work.run(
            len(source.data), lambda: self._reader.read(source, namespace, wants_pixels=wants_pixels), tenant
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
        self, messages: Sequence[Message], num_images: int, render: Callable[[list[Message]], Awaitable[str]]
    ) -> str:
        """The text of a conversation's prompt, with one placeholder for each image.

        Args:
            messages: with `{"type": "image"}` for each image.
            render: renders messages with the chat template.

        Raises:
            InvalidRequestError: a text spells a placeholder, or the chat template renders fewer images.
        """
        self.tokens.check_not_spelled([message.get("content") for message in messages], "messages")
        text = await render(list(messages))
        if self.tokens.num_markers(text) != num_images:
            text = await render(images_after_tools(messages))
            self.tokens.check_rendered(text, num_images)
        return self.tokens.with_placeholders(text)

    def close(self) -> None:
        """Kill the processes that decode."""
        self._reader.close()
        self._work.close()


class OfflineImages:
    """As `ImagePrompts`, for callers that wait."""

    def __init__(self, image_input: ImageInput, tokenizer: Tokenizer, limits: ImageConfig) -> None:
        self.tokens = ImageTokens(image_input, tokenizer)
        self._limits = limits
        self._reader = ImageReader(image_input, limits)

    def read(self, sources: Sequence[ImageSource]) -> list[Picture]:
        """Read images. Raises as `ImagePrompts.read`."""
        check_number(sources, self._limits)
        return [self._reader.read(source) for source in sources]

    def render(self, messages: Sequence[Message], num_images: int, render: Callable[[list[Message]], str]) -> str:
        """The text of a conversation's prompt. See `ImagePrompts.render`."""
        self.tokens.check_not_spelled([message.get("content") for message in messages], "messages")
        text = render(list(messages))
        if self.tokens.num_markers(text) != num_images:
            text = render(images_after_tools(messages))
            self.tokens.check_rendered(text, num_images)
        return self.tokens.with_placeholders(text)

    def close(self) -> None:
        """Kill the processes that decode."""
        self._reader.close()
