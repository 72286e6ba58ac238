"""Prompts of callers as token ids; long ones beside the event loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.errors import InvalidRequestError
from penstock.frontend.large_work import LargeWork
from penstock.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters from which tokenising, some milliseconds then, leaves the event loop for a thread."""


class PromptEncoder:
    """Tokenises texts, and conversations through the checkpoint's chat template."""

    def __init__(self, tokenizer: Tokenizer | None, large_work: LargeWork) -> None:
        """
        Args:
            tokenizer: None if the checkpoint has none: every text is refused then.
        """
        self._tokenizer = tokenizer
        self._large_work = large_work

    def need_tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidRequestError: the model came without a tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("the model came without a tokenizer: send token ids to /v1/completions")
        return self._tokenizer

    async def encode(self, text: str) -> list[int]:
        """A prompt as token ids.

        Raises:
            InvalidRequestError: the model came without a tokenizer.
        """
        tokenizer = self.need_tokenizer()
        return await self._off_loop_if_long(len(text), lambda: tokenizer.encode(text))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, prefill: str = "", **options: Any
    ) -> list[int]:
        """A conversation as token ids, through the checkpoint's chat template; `prefill` is how the answer begins.

        Raises:
            InvalidRequestError: there is no tokenizer or template, or the template refuses the conversation or takes
                too much time or memory for it.
        """
        tokenizer = self.need_tokenizer()
        text = await self.render_chat(messages, **options) + prefill
        return await self._off_loop_if_long(len(text), lambda: tokenizer.encode(text, add_special_tokens=False))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as the checkpoint's chat template writes it. Raises as `encode_chat` does."""
        return await self.need_tokenizer().apply_chat_template_from_loop(messages, **options)

    async def _off_loop_if_long(self, size: int, work: Callable[[], T]) -> T:
        return await self._large_work.run(size, work) if size >= LONG_TEXT else work()
