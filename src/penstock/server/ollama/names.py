"""Names of the served model and its adapters, which Ollama's clients write with a tag: `NAME:latest`."""

import asyncio
import re
from collections.abc import Mapping

from penstock.checkpoint.created import LATEST, find_created
from penstock.errors import InvalidRequestError, ModelNotFoundError
from penstock.server.dialect import Call
from penstock.server.serving import ANY_MODEL

_NAME = re.compile(r"[\w.:/@+-]{1,256}", re.ASCII)


def is_ollama_client(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from one of Ollama's own clients: `ollama/0.12`, `ollama-python/0.6`, `ollama-js/0.6`."""
    return headers.get("user-agent", "").startswith("ollama")


def tagged(name: str) -> str:
    """The name with a tag: the clients add one themselves, and look for that name in the list."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served_name(call: Call, name: str) -> str:
    """The name without the tag that clients add, unless it is served with that."""
    return name if call.serves(name) else name.removesuffix(LATEST)


async def choose_model(call: Call, name: str | None) -> str:
    """Select the model or adapter of this name. Returns the name as answers repeat it.

    Raises:
        ModelNotFoundError: there is none.
    """
    if name is not None and not call.serves(served_name(call, name)):
        await _check_not_created(name)
    call.choose_model(None if name is None else served_name(call, name))
    return call.model_name if name is None else name


async def _check_not_created(name: str) -> None:
    """
    Raises:
        ModelNotFoundError: there is such a model, which is not served.
    """
    if await asyncio.to_thread(find_created, name) is not None:  # which may wait for another process
        raise ModelNotFoundError(
            f"the model {name!r} was created, but is not served here: start a server of it by penstock serve "
            f"{name.removesuffix(LATEST)}",
            "model",
        )


def check_new_name(name: str, field: str) -> str:
    """A new name, without the tag that clients add.

    Raises:
        InvalidRequestError: it is no name.
    """
    own = name.removesuffix(LATEST)
    if not _NAME.fullmatch(own):
        raise InvalidRequestError(f"{field} must be 1 to 256 letters, digits, and ._-+@:/, not {name[:80]!r}", field)
    if own in ANY_MODEL:
        raise InvalidRequestError(f"{field}: {own!r} stands for any model in some clients: choose another", field)
    return own
