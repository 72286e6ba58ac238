"""What answers a chat: a model in this process (`local`), or a running server (`remote`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from penstock.dataclass import dataclass
from penstock.parsers.parts import Reasoning, Text

Setting = int | float | str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer so far."""

    num_prompt_tokens: int | None
    num_tokens: int
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None: unknown."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer."""

    reason: str | None
    """`stop`, `length` or another server's word."""
    error: str | None = None


StreamItem = Reasoning | Text | Usage | Ending


class Backend(Protocol):
    """A model that answers conversations."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def settings(self) -> dict[str, Setting]:
        """Sampling settings from the command's flags, and replacements for missing ones of the checkpoint."""
        ...

    def models(self) -> list[str]:
        """Names that `select` is known to accept."""
        ...

    def select(self, model: str) -> None:
        """Answer with another model from now on.

        Raises:
            PenstockError: it cannot be used; the present model stays.
        """
        ...

    def stream(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Setting]) -> Iterator[StreamItem]:
        """Stream an answer with these settings besides its own; leaving the loop early stops it.

        Raises:
            PenstockError: the request is refused, or the model cannot be reached.
        """
        ...

    def close(self) -> None:
        """Free the model, or do nothing."""
        ...
