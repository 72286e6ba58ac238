"""Storage of OpenAI's Responses, for `previous_response_id`, `item_reference`, and the routes of stored responses.

Stored as JSON are the response, and its own new items with ids in OpenAI's shape.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError, PreviousResponseNotFoundError, ResponseNotFoundError
from penstock.frontend.recovery.recent_responses import RecentResponses, StoredResponse
from penstock.server.openai.responses_items_schema import Item, ItemReference, MessageItem
from penstock.server.openai.responses_schema import InputItemList, ResponseObject, ResponsesBody

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_encode = msgspec.json.Encoder().encode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_NOT_STORED = "is not stored here, or not any more"
_SEND_ALL = "send the whole conversation as input"


class _Output(msgspec.Struct):
    output: msgspec.Raw


_decode_output = msgspec.json.Decoder(_Output).decode


@dataclass(frozen=True, slots=True)
class Recalled:
    """The stored responses that a body refers to."""

    chain: Sequence[StoredResponse]
    """The response that it continues, preceded by that one's ancestors, oldest first."""
    holders: Mapping[str, StoredResponse]
    """Responses that contain referenced items, by response id."""
    references: Sequence[str]
    """Ids of the referenced items."""

    @property
    def num_bytes(self) -> int:
        return sum(len(stored.input) + len(stored.response) for stored in (*self.chain, *self.holders.values()))

    def earlier_items(self) -> list[Item]:
        """The items of the chain."""
        return _ITEMS.validate_python([item for stored in self.chain for item in _items_of(stored)])

    def resolve(self, given: Sequence[Item]) -> list[Item]:
        """The items with each reference replaced by its item."""
        found = {item["id"]: item for holder in self.holders.values() for item in _items_of(holder)}
        whole = _ITEMS.validate_python([found[id] for id in self.references])
        by_id = dict(zip(self.references, whole, strict=True))
        return [by_id[item.id] if isinstance(item, ItemReference) else item for item in given]


def _items_of(stored: StoredResponse) -> list[dict[str, Any]]:
    """A response's own input and output. (Pydantic's JSON parser refuses nesting deeper than 200 levels.)"""
    return _decode_items(stored.input) + _decode_items(_decode_output(stored.response).output)


def input_items(body: ResponsesBody) -> Sequence[Item]:
    """The input of a body as items."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def recall(body: ResponsesBody, recent: RecentResponses, tenant: str) -> Recalled:
    """
    Raises:
        ResponseNotFoundError: the response that the body continues, or an item that it refers to, is not stored.
        InvalidRequestError: it refers to an item twice.
    """
    previous = body.previous_response_id
    chain = [] if previous is None else recent.chain(tenant, previous)
    if chain is None:
        raise PreviousResponseNotFoundError(
            f"Previous response with id {(previous or '')[:80]!r} not found: it, or a response that it continues, "
            f"{_NOT_STORED}; {_SEND_ALL}",
            "previous_response_id",
        )
    references: dict[str, None] = {}
    for item in input_items(body):
        if isinstance(item, ItemReference):
            if item.id in references:  # a few bytes could stand for a long item as often as the body has room
                raise InvalidRequestError(f"Duplicate item found with id {item.id[:80]!r}: refer to it once", "input")
            references[item.id] = None
    holders = {holder.id: holder for holder in (_holder(recent, tenant, id) for id in references)}
    recent.use(tenant, holders)
    return Recalled(chain, holders, list(references))


def _holder(recent: RecentResponses, tenant: str, item_id: str) -> StoredResponse:
    holder = recent.with_item(tenant, item_id)
    if holder is None:
        raise ResponseNotFoundError(
            f"Item with id {item_id[:80]!r} not found: it {_NOT_STORED}; {_SEND_ALL}, with whole items instead of "
            "references (some clients do that if store is false)",
            "input",
        )
    return holder


# ── storing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def stored_input(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """New items in OpenAI's shape; those without an id of their own get one."""
    stored: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(items):
        stored_item = _stored_item(item)
        id = stored_item.get("id")
        if not isinstance(id, str) or not id or id in stored:
            prefix = _PREFIXES.get(str(stored_item.get("type")), "item")
            id = stored_item["id"] = f"{prefix}_{response_id.removeprefix('resp_')}in{index:02x}"
        stored[id] = stored_item
    return list(stored.values())


def _stored_item(item: Item) -> dict[str, Any]:
    stored = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        stored["status"] = "completed"
        if isinstance(item.content, str):
            text = "output_text" if item.role == "assistant" else "input_text"
            stored["content"] = [{"type": text, "text": item.content}]
    return stored


def storing(
    recent: RecentResponses, tenant: str, parent: str | None, items: Sequence[dict[str, Any]]
) -> Callable[[ResponseObject], None]:
    """Returns a function that stores a response to these new items."""
    input = _encode(items)

    def store(response: ResponseObject) -> None:
        item_ids = tuple(str(item["id"]) for item in (*items, *response["output"]))
        recent.put(StoredResponse(response["id"], tenant, parent, item_ids, input, _encode(response)))

    return store


# ── the routes of stored responses ───────────────────────────────────────────────────────────────────────────────────


def stored_response(recent: RecentResponses, tenant: str, id: str) -> StoredResponse:
    """
    Raises:
        ResponseNotFoundError: there is none.
    """
    found = recent.get(tenant, id)
    if found is None:
        raise ResponseNotFoundError(f"Response with id {id[:80]!r} not found: it {_NOT_STORED}", "response_id")
    return found


def list_input(stored: StoredResponse, after: str | None, limit: int, *, newest_first: bool) -> InputItemList:
    """A page of a response's own input.

    Raises:
        ResponseNotFoundError: `after` is none of its items.
    """
    items = _decode_items(stored.input)
    items = items[::-1] if newest_first else items
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ResponseNotFoundError(f"Item with id {after[:80]!r} not found in the response's input", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
