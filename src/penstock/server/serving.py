"""An engine as a server's routes see it: the names of its model, and what calls of all dialects share."""

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import InvalidRequestError, ModelNotFoundError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.recovery.recent_responses import RecentResponses
from penstock.parsers.conversation import ChatFormat, format_of

ANY_MODEL = ("tgi", "dummy")
"""Model names that Hugging Face's clients send to a server given by its address."""
MAX_NAMES = 256
"""Maximum names of the served model."""


class Serving:
    """An engine, and the names of its model."""

    def __init__(
        self,
        engine: AsyncEngine,
        model_names: Sequence[str],
        recent_responses: RecentResponses,
        resumable_streams: bool = False,
    ) -> None:
        """
        Args:
            model_names: the model's names for clients; answers to calls that name none have the first.
            recent_responses: responses stored for `previous_response_id`.
            resumable_streams: whether stream event ids contain what another server needs to resume the stream.
        """
        self.engine = engine
        self.model_names = tuple(model_names)
        self.recent_responses = recent_responses
        self.resumable_streams = resumable_streams
        self.created = int(time.time())

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (*self.model_names, *(adapter.name for adapter in self.engine.adapters))

    def has_name(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        return name in self.model_names or self.engine.adapters.find(name) is not None

    def add_name(self, name: str, field: str) -> None:
        """Serve the model under one more name, until the server ends.

        Args:
            field: the field of the name, for errors.

        Raises:
            InvalidRequestError: an adapter has this name, or there are too many names.
        """
        if name in self.model_names:
            return
        if self.engine.adapters.find(name) is not None:
            raise InvalidRequestError(f"{field}: an adapter has the name {name!r}: choose another", field)
        if len(self.model_names) >= MAX_NAMES:
            raise InvalidRequestError(f"{field}: the model has {MAX_NAMES} names already: delete some", field)
        self.model_names = (*self.model_names, name)

    def remove_name(self, name: str, field: str) -> bool:
        """Remove a name that was added; returns whether there was one.

        Raises:
            InvalidRequestError: it is the model's own name.
        """
        if name == self.model_names[0]:
            raise InvalidRequestError(f"{field}: {name!r} is the served model itself: stop the server instead", field)
        found = name in self.model_names
        self.model_names = tuple(other for other in self.model_names if other != name)
        return found

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
