"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ConfigError              an option, or a combination of options, that cannot work
    │   ├── CheckpointError      a model folder that is incomplete, damaged or of an unknown kind
    │   ├── NativeLibraryError   a native library that was built from other sources than the package
    │   └── MissingTorchError    a feature that needs PyTorch, which is not installed
    ├── InvalidRequestError      a request that is refused; `param` names the field at fault
    │   ├── PromptTooLongError   the prompt, or prompt and max_tokens together, exceed the context
    │   ├── ModelNotFoundError   the request names a model that is not served here
    │   ├── WrongTaskError       the model that is served is for another task
    │   ├── RequestNotFoundError the journal knows no such request
    │   ├── ResponseNotFoundError    no such response or item is stored
    │   │   └── PreviousResponseNotFoundError    the response to continue is not stored
    │   ├── BodyTooLargeError    the HTTP body exceeds its limit
    │   └── QuarantinedError     an equal request made the engine fail, more than once
    ├── AuthenticationError      no API key, or one that this server does not know
    ├── NotPermittedError        a known caller who may not do this
    │   └── ModelNotPermittedError   the API key may not use the model
    ├── BodyTimeoutError         the HTTP body did not arrive in time
    ├── LimitError               refused for now; `retry_after` says when to come back
    │   ├── RateLimitError       the key's requests or tokens per minute are used up
    │   ├── OverloadedError      as much as may be open or queued is open or queued
    │   │   ├── QueueTimeoutError    it waited in the queue for as long as it was allowed to
    │   │   └── ShuttingDownError    the server finishes what is open, and ends
    │   ├── JournalUnavailableError  the journal cannot be written now, so no request can be accepted
    │   └── SlowReaderError      the client did not read its stream as fast as it may fall behind
    └── EngineError              the engine failed, not the caller
        ├── JournalDamagedError  what the journal held of a request is damaged, and lost
        └── EngineDeadError      the engine is gone; nothing more can be asked of it

A message says what was wrong, what would be accepted and, where it helps, how to mend it.
"""

import difflib
from collections.abc import Iterable

_LONGEST_SHOWN = 200


def shown(value: object) -> str:
    """A value of a file as shown in an error, shortened."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def did_you_mean(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> str:
    """The end of an error about an unknown name: those like it, at least by `cutoff` of 1, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class PenstockError(Exception):
    """The root: `except PenstockError` catches all that Penstock raises on purpose."""


class ConfigError(PenstockError):
    """An option, or a combination of options, that cannot work."""


class CheckpointError(ConfigError):
    """A model folder that is incomplete, damaged or of an unknown kind."""


class AdapterError(ConfigError):
    """An adapter that is incomplete, damaged, or does not fit the model."""


class NativeLibraryError(ConfigError):
    """A native library that was built from other sources than the package that loads it."""


class MissingTorchError(ConfigError):
    """PyTorch is needed, and is not installed."""

    def __init__(self, purpose: str, reason: str = "") -> None:
        """
        Args:
            purpose: what it is needed for, a noun.
            reason: why nothing else will do, a clause.
        """
        end = f"; {reason}" if reason else ""
        super().__init__(f"PyTorch is needed for {purpose}: pip install '.[torch]' in Penstock's source folder{end}")


class InvalidRequestError(PenstockError):
    """A request that is refused before any work is done for it.

    `param` is the field at fault as the caller wrote it, or None if no single one is. `over_http` is advice that the
    server adds to the message: the routes that a client may ask instead.
    """

    def __init__(self, message: str, param: str | None = None, *, over_http: str = "") -> None:
        super().__init__(message)
        self.param = param
        self.over_http = over_http


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt and `max_tokens` together, exceed the model's context."""


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class WrongTaskError(InvalidRequestError):
    """The model that is served is for another task: it embeds, scores or generates."""


class RequestNotFoundError(InvalidRequestError):
    """The journal knows no such request."""


class ResponseNotFoundError(InvalidRequestError):
    """No such response, or no response with such an item, is stored."""


class PreviousResponseNotFoundError(ResponseNotFoundError):
    """The response to continue, or one that it continues, is not stored."""


class BodyTooLargeError(InvalidRequestError):
    """The HTTP body exceeds its limit."""


class QuarantinedError(InvalidRequestError):
    """An equal request made the engine fail, more than once."""


class AuthenticationError(PenstockError):
    """No API key, or one that this server does not know."""


class NotPermittedError(PenstockError):
    """A known caller who may not do this: it is for operators."""


class ModelNotPermittedError(NotPermittedError):
    """The caller's API key may not use the model or adapter."""


class ForbiddenOriginError(PenstockError):
    """A web page of an origin that may not call this server."""


class BodyTimeoutError(PenstockError):
    """The HTTP body did not arrive in time."""


class LimitError(PenstockError):
    """A request that could be served at another time. `retry_after` is when to come back, in seconds from now."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(LimitError):
    """The key's requests or tokens per minute are used up."""


class OverloadedError(LimitError):
    """The limit of open or queued requests is reached."""


class QueueTimeoutError(OverloadedError):
    """The request waited in the queue for as long as it was allowed to."""


class ShuttingDownError(OverloadedError):
    """The server finishes open requests and ends. Another may be behind the same address soon."""


class JournalUnavailableError(LimitError):
    """The journal cannot be written now, so no request can be accepted; it is tried again all the time."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message, retry_after)


class SlowReaderError(LimitError):
    """The client read its stream too slowly, so the request was ended."""


class EngineError(PenstockError):
    """The engine failed, not the caller."""


class ClientGoneError(EngineError):
    """The client closed its connection before the answer was complete."""


class JournalDamagedError(EngineError):
    """A request's rows of the journal are damaged, and lost."""


class EngineDeadError(EngineError):
    """The engine is gone; nothing more can be asked of it."""


class DeviceLostError(EngineDeadError):
    """The device or its runtime is unusable: no later step can succeed, so the engine's process must be replaced."""
