"""Introspection of the Python API: options in signatures and `help`, and advice for other engines' argument names."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from textwrap import wrap
from typing import Any, ParamSpec, TypeVar

from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import iter_options
from penstock.errors import InvalidRequestError

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

FOREIGN_ARGUMENTS = {
    "sampling_params": "params",
    "use_tqdm": "progress",
    "lora_request": "adapter",
    "prompt_token_ids": "prompts",
    "chat_template_kwargs": "a keyword for each variable",
}
"""Arguments of vLLM's `LLM`, with the equivalent here."""
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def lists_options(cls: type[T]) -> type[T]:
    """Class decorator that lists the engine's options, its keywords, in the signature and in `help`."""
    init = inspect.signature(cls)
    own = [each for each in init.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [field for _, field in iter_options() if field.name not in init.parameters]
    named = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in options
    ]
    cls.__signature__ = init.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    cls.__init__.__doc__ = "Options:\n" + "\n".join(line for field in options for line in _entry(field))
    return cls


def _entry(field: "Field[Any]") -> Iterator[str]:
    choices = field.metadata["choices"]
    yield f"    {field.name} (default: {field.default!r})"
    yield from (f"        {line}" for line in wrap(field.metadata["help"], 100))
    if choices:
        yield f"        One of {', '.join(choices)}."


def advises_names(method: Callable[P, R]) -> Callable[P, R]:
    """Method decorator that refuses other engines' argument names, and names the equivalent here.

    Raises:
        InvalidRequestError: the method was called with such an argument.
    """

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in FOREIGN_ARGUMENTS:
                raise InvalidRequestError(
                    f"{method.__name__} has no argument {name!r}; here it is {FOREIGN_ARGUMENTS[name]}", name
                )
            if name in _SAMPLING:
                raise InvalidRequestError(
                    f"{method.__name__} has no argument {name!r}; it belongs into params: SamplingParams({name}=...)",
                    name,
                )
        return method(*args, **kwargs)

    return checked
