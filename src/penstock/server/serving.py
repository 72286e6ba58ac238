"""An engine as a server's routes see it: the names of its model, and what calls of all dialects share."""

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.api.request import Adapter
from penstock.errors import ModelNotFoundError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.model_names import ModelNames
from penstock.frontend.recovery.recent_responses import RecentResponses
from penstock.parsers.conversation import ChatFormat, format_of

ANY_MODEL = ("tgi", "dummy")
"""Model names that Hugging Face's clients send to a server given by its address."""


class Serving:
    """An engine, and the names of its model."""

    def __init__(
        self,
        engine: AsyncEngine,
        names: ModelNames,
        recent_responses: RecentResponses,
        resumable_streams: bool = False,
    ) -> None:
        """
        Args:
            recent_responses: responses stored for `previous_response_id`.
            resumable_streams: whether stream event ids contain what another server needs to resume the stream.
        """
        self.engine = engine
        self.names = names
        self.recent_responses = recent_responses
        self.resumable_streams = resumable_streams
        self.created = int(time.time())

    @property
    def adapters(self) -> list[Adapter]:
        """The model's adapters."""
        return list(self.engine.adapters)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (*self.names.all, *(adapter.name for adapter in self.engine.adapters))

    def copy_adapter(self, source: str, name: str) -> None:
        """Give an adapter one more name, which nothing has."""
        self.engine.adapters.copy_adapter(source, name)

    def remove_adapter(self, name: str) -> Adapter | None:
        """Remove an adapter. Returns it; None if there is none of this name."""
        return self.engine.adapters.remove(name)

    def has_name(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        return name in self.names.all or self.engine.adapters.find(name) is not None

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """The format of the model's answers."""
        tokenizer = self.engine.tokenizer
        known = format_of("" if tokenizer is None else tokenizer.chat_template_source)
        return replace(
            known,
            takes_images=self.engine.takes_images,
            takes_sounds=self.engine.takes_sounds,
            encoder_note=self.engine.info.encoder_note,
        )


def unknown_model(name: str, names: Sequence[str], also: str = "") -> ModelNotFoundError:
    """The error for a model that is not among those of these names; `also`: what else there is."""
    known = f"; {' or '.join(map(repr, names))} is" if names else ""
    return ModelNotFoundError(f"the model {name!r} is not served here{known}{also}", "model")
