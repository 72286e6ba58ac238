"""How much of an agent's conversation is found in the cache: of each turn's tokens, those that the next turn reuses."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.agents_proxy import Exchange

TEN_TURNS = "SCRIPT=ten."


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one turn, as Anthropic's dialect counts them."""

    computed: int
    cached: int
    answered: int

    @property
    def total(self) -> int:
        return self.computed + self.cached + self.answered


def usage_of(answer: str) -> Usage:
    """The usage of an answer of /v1/messages, whole or streamed."""
    told: dict[str, Any] = {}
    for data in _documents(answer):
        told |= data.get("usage") or data.get("message", {}).get("usage") or {}
    return Usage(told["input_tokens"], told.get("cache_read_input_tokens") or 0, told["output_tokens"])


def _documents(answer: str) -> Iterable[dict[str, Any]]:
    if answer.startswith("{"):
        return [json.loads(answer)]
    return [json.loads(line[len("data: ") :]) for line in answer.splitlines() if line.startswith("data: {")]


def reused_shares(turns: Sequence[Usage]) -> list[float]:
    """For each turn but the first: the share of the turn before that was found again."""
    return [after.cached / before.total for before, after in itertools.pairwise(turns)]


def prefix_lines(exchanges: Iterable[Exchange]) -> list[str]:
    """A line of a table with the shares of the conversation of ten turns, if there was one."""
    turns = [
        usage_of(exchange.answer)
        for exchange in exchanges
        if exchange.status == 200 and exchange.path.startswith("/v1/messages?") and _is_of_ten(exchange.body)
    ]
    shares = reused_shares(turns)
    if not shares:
        return []
    return [
        f"found again of the turn before: {', '.join(f'{share:.1%}' for share in shares)} ({turns[-1].total} tokens)"
    ]


def _is_of_ten(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.get("tools")) and TEN_TURNS in json.dumps(body["messages"])
