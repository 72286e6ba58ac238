"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ConfigError              an option, or a combination of options, that cannot work
    │   └── CheckpointError      a model folder that is incomplete, damaged or of an unknown kind
    ├── InvalidRequestError      a request that is refused; `param` names the field at fault
    │   ├── PromptTooLongError   the prompt, or prompt and max_tokens together, exceed the context
    │   └── ModelNotFoundError   the request names a model that is not served here
    └── EngineError              the engine failed, not the caller
        └── EngineDeadError      the engine is gone; nothing more can be asked of it

A message says what was wrong, what would be accepted and, where it helps, how to mend it.
"""


class PenstockError(Exception):
    """The root: `except PenstockError` catches all that Penstock raises on purpose."""


class ConfigError(PenstockError):
    """An option, or a combination of options, that cannot work."""


class CheckpointError(ConfigError):
    """A model folder that is incomplete, damaged or of an unknown kind."""


class InvalidRequestError(PenstockError):
    """A request that is refused before any work is done for it.

    `param` is the field at fault as the caller wrote it, or None if no single one is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt and `max_tokens` together, exceed the model's context."""


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class EngineError(PenstockError):
    """The engine failed, not the caller."""


class EngineDeadError(EngineError):
    """The engine is gone; nothing more can be asked of it."""
