"""The tools that a model may call in one request, and whether it must."""

import hashlib
import json
import re
import string
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from penstock.api.subschemas import map_schemas, without_nulls
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError

Choice = Literal["auto", "required", "none"]

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = string.digits + string.ascii_letters
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A tool of the caller's own.

    Raises:
        InvalidRequestError: the name is invalid, or the schema is not that of an object.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of the arguments, an object; None: no arguments. Keywords that are null are dropped."""
    strict: bool = False
    """Whether its arguments must be valid even if calls are not forced."""
    schema_size: int = field(init=False, repr=False, compare=False)
    """Length of the arguments' schema in characters."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequestError(
                f"tools: a name must be 1 to 128 letters, digits, _, . and -, not {self.name[:80]!r}", "tools"
            )
        set_field = object.__setattr__
        try:
            set_field(self, "parameters", map_schemas(self.parameters, without_nulls))
            json.dumps([self.description, self.parameters], ensure_ascii=False).encode()
            set_field(self, "schema_size", len(json.dumps(self.schema)))
        except UnicodeEncodeError:
            raise InvalidRequestError(f"the tool {self.name} contains an unpaired surrogate", "tools") from None
        except RecursionError:
            raise InvalidRequestError(f"the tool {self.name} is nested too deeply", "tools") from None
        types = "object" if self.parameters is None else self.parameters.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            raise InvalidRequestError(f"the parameters of {self.name} must be a schema of type object", "tools")

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of its arguments."""
        return _NO_PARAMETERS if self.parameters is None else {**self.parameters, "type": "object"}

    def as_template_sees_it(self) -> dict[str, Any]:
        """The function as chat templates expect it: in OpenAI's format."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, and whether they must be called.

    Raises:
        InvalidRequestError: two tools have one name, there are too many, or the tool that must be called is missing.
    """

    functions: tuple[Function, ...]
    choice: Choice = "auto"
    names: tuple[str, ...] | None = None
    """Names of the tools that may be called; None: all."""
    parallel: bool = True
    """Whether an answer may have several calls."""

    def __post_init__(self) -> None:
        if len(self.functions) > MAX_TOOLS:
            raise InvalidRequestError(f"there are {len(self.functions)} tools; at most {MAX_TOOLS}", "tools")
        names: set[str] = set()
        for function in self.functions:
            if function.name in names:
                raise InvalidRequestError(f"two tools are named {function.name!r}", "tools")
            names.add(function.name)
        if not names and self.choice == "required":
            raise InvalidRequestError("tool_choice demands a call, but there are no tools: give some", "tool_choice")
        for name in self.names or ():
            if name not in names:
                raise InvalidRequestError(f"tool_choice names {name[:80]!r}, which is none of the tools", "tool_choice")

    @classmethod
    def forced(cls, functions: tuple[Function, ...], name: str) -> "Tools":
        """Tools that require exactly one call, of the function `name`."""
        return cls(functions, "required", (name,), parallel=False)

    @property
    def offered(self) -> tuple[Function, ...]:
        """The functions that the prompt describes."""
        return () if self.choice == "none" else self.functions

    @property
    def callable(self) -> tuple[Function, ...]:
        """The functions that the model may call."""
        if self.names is None:
            return self.offered
        names = frozenset(self.names)
        return tuple(function for function in self.offered if function.name in names)

    @property
    def enforced(self) -> bool:
        """Whether a grammar enforces the calls."""
        if not self.offered:
            return False
        strict = any(function.strict for function in self.callable)
        return self.choice == "required" or strict or not self.parallel or self.names is not None


NO_TOOLS = Tools(())


def call_id(request_id: str, index: int, call_index: int) -> str:
    """The id of a call, a function of request, answer and call, so that a resumed stream repeats it.

    Nine letters and digits, as Mistral's templates require; others accept any id.
    """
    return _nine(f"{request_id}/{index}/{call_index}")


def template_id(given: str) -> str:
    """The id of an earlier call as templates receive it: ours unchanged, others mapped to nine characters."""
    return given if _ID.fullmatch(given) else _nine(given)


def _nine(text: str) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest(), "big")
    return "".join(_DIGITS[number // 62**digit % 62] for digit in range(9))


def arguments_text(arguments: object, field: str) -> str:
    """The arguments of a call of an earlier turn, as JSON.

    Raises:
        InvalidRequestError: they are nested too deeply; `param` is `field`.
    """
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError(f"{field}: the arguments are nested too deeply", field) from None


def called(name: str, arguments: str, id: str) -> dict[str, Any]:
    """A call of an earlier turn as chat templates expect it, with its arguments as an object."""
    return {
        "id": template_id(id),
        "type": "function",
        "function": {"name": name, "arguments": arguments_object(arguments)},
    }


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object, which many chat templates require. None are an empty object.

    Malformed or truncated arguments are wrapped as Anthropic recommends.
    """
    try:
        value = json.loads(arguments) if arguments else None
    except (ValueError, RecursionError):
        value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def add_names(messages: list[dict[str, Any]]) -> None:
    """Add the name of the called tool to results without one, as some templates require."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    names = {call["id"]: call["function"]["name"] for call in calls}
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
