"""Recorded request bodies of agents and SDKs, in tests/agents/bodies: short, and the same whenever they are recorded.

A file keeps the bodies that have something that none before it has: a field, a kind of value, a kind of block. Long
texts are cut; ids, paths, dates and ports are replaced; large fields that several bodies have stand once, in `shared`.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.agents_proxy import Exchange

LONGEST_TEXT, KEPT_TEXT = 200, 120
"""Characters of the longest text that is kept whole, and of what is kept of a longer one."""
LARGE = 1000
"""Characters of a field that is shared."""
KEPT_HEADERS = ("anthropic-beta", "anthropic-version")
WORDS = ("type", "role", "effort", "display", "tool_choice", "summary", "status", "phase", "keep", "truncation")
"""Fields whose values make bodies differ in kind."""
IDS = re.compile(r"(?:^|_)(?:ids?|uuid|cache_key|user)$")
REPLACED = (
    (re.compile(r"http://127\.0\.0\.1:\d+"), "http://127.0.0.1:8000"),
    (
        re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        "00000000-0000-4000-8000-000000000000",
    ),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "0" * 32),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "2026-01-01"),
    (re.compile(r"\b1[789]\d{11}\b"), "1700000000000"),
    (re.compile(r"Linux \d[\w.-]+"), "Linux 6.0"),
)


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """The requests of a file: `path`, `headers` and `body` of each."""
    recorded = json.loads(path.read_text())
    for request in recorded["requests"]:
        body = {key: _from_shared(value, recorded["shared"]) for key, value in request["body"].items()}
        yield {**request, "body": body}


def _from_shared(value: Any, shared: list[Any]) -> Any:
    return shared[value["shared"]] if isinstance(value, dict) and value.keys() == {"shared"} else value


def write_bodies(path: Path, exchanges: Iterable[Exchange], home: Path) -> None:
    """Write the distinct bodies of a client.

    Args:
        home: the folder under which agents live, which is replaced.
    """
    shared: list[Any] = []
    requests = []
    for exchange, body in distinct(exchanges, home):
        headers = {name: exchange.headers[name] for name in KEPT_HEADERS if name in exchange.headers}
        kept = {key: _to_shared(value, shared) for key, value in body.items()}
        requests.append({"path": exchange.path, "headers": headers, "body": kept})
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"shared": ' + _one_a_line(shared) + ', "requests": ' + _one_a_line(requests) + "}\n")


def _one_a_line(values: list[Any]) -> str:
    """JSON of a list, so that what differs shows as lines."""
    return "[\n" + ",\n".join(json.dumps(value, ensure_ascii=False) for value in values) + "\n]"


def _to_shared(value: Any, shared: list[Any]) -> Any:
    if not isinstance(value, dict | list) or len(json.dumps(value)) < LARGE:
        return value
    if value not in shared:
        shared.append(value)
    return {"shared": shared.index(value)}


def distinct(exchanges: Iterable[Exchange], home: Path) -> Iterator[tuple[Exchange, dict[str, Any]]]:
    """The exchanges whose bodies differ in kind from those before, and their bodies in their short form."""
    seen: set[str] = set()
    for exchange in exchanges:
        body = exchange.body
        if not isinstance(body, dict) or "model" not in body or refers_to_answers(body):
            continue
        body = Shortened(str(home)).value(body)
        shape = {exchange.path, *shape_of(body)}
        if not shape <= seen:
            seen |= shape
            yield exchange, body


def refers_to_answers(body: dict[str, Any]) -> bool:
    """Whether a body names answers that a server has kept, which another one does not have, or wants that one does."""
    items = body.get("input")
    kinds = [item.get("type") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return body.get("previous_response_id") is not None or "item_reference" in kinds or "thread" in body


def shape_of(value: Any, path: str = "") -> Iterator[str]:
    """What a body has: the paths of its values, with their kinds."""
    if isinstance(value, dict):
        yield f"{path}{{}}" if not value else path
        for key, item in value.items():
            yield from shape_of(item, f"{path}.{key}")
    elif isinstance(value, list):
        yield f"{path}[]" if not value else path
        for item in value:
            yield from shape_of(item, f"{path}.{item['type']}" if isinstance(item, dict) and "type" in item else path)
    elif value is None or isinstance(value, bool) or value == "" or path.rpartition(".")[2] in WORDS:
        yield f"{path}={value}"
    else:
        yield f"{path}:{type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Shortened:
    """The short form of one body."""

    home: str
    ids: dict[str, str] = field(default_factory=dict)

    def value(self, value: Any, key: str = "") -> Any:
        """A value's short form."""
        if isinstance(value, dict):
            return {name: self.value(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, key) for item in value]
        return self._text(value, key) if isinstance(value, str) else value

    def _text(self, text: str, key: str) -> str:
        if text[:1] in "{[" and (document := _parsed(text)) is not None:
            return json.dumps(self.value(document))
        if IDS.search(key) and text and "{" not in text:
            prefix = re.match(r"(?:[a-z]+[_-])?", text)
            assert prefix is not None
            return self.ids.setdefault(text, f"{prefix[0]}{len(self.ids):09}")
        text = text.replace(self.home, "/home/agent")
        for pattern, replacement in REPLACED:
            text = pattern.sub(replacement, text)
        return text if len(text) <= LONGEST_TEXT else text[:KEPT_TEXT] + "…"


def _parsed(text: str) -> Any:
    """A text's JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
