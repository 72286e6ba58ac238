"""Synthetic chats: each has one of a few system prompts and several turns, and each prompt repeats the conversation.

The next question follows after the user has read the answer, so a slow fleet gets fewer requests (a closed loop).
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import fields
from random import Random

from penstock.config.engine_config import option
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.simulator.workload import ANY_TOKEN, INT32, Arrival, make_tokens

LONGEST = 8
"""Maximum of a length, as a multiple of the mean."""
LARGEST = 1e9
"""Maximum of a number, which keeps sums and products finite."""
SMALLEST_BURSTINESS = 1e-6
"""Burstiness below which chats begin at regular intervals."""

_MAY_BE_ZERO = ("burstiness", "system_prompts", "system_tokens", "spread", "think_seconds", "seed")
_MOST = {"burstiness": 100.0, "seed": math.inf, "vocab_size": ANY_TOKEN}


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats that begin at random times. Lengths are drawn from log-normal distributions with these means.

    Raises:
        ConfigError: a value is out of its range.
    """

    chats_per_second: float = option(1.0, "chats that begin per second")
    seconds: float = option(600.0, "time during which chats begin")
    burstiness: float = option(
        1.0, "coefficient of variation of the time between two chats: 0 regular, 1 random (Poisson), above 1 bursts"
    )
    turns: float = option(3.0, "mean questions per chat")
    system_prompts: int = option(8, "number of system prompts that chats choose from; 0: none")
    system_tokens: int = option(512, "tokens of a system prompt")
    question_tokens: int = option(128, "mean tokens of a question")
    answer_tokens: int = option(160, "mean tokens of an answer")
    spread: float = option(0.8, "standard deviation of the logarithms of these lengths")
    think_seconds: float = option(10.0, "mean time between an answer and the next question")
    tenants: int = option(1, "number of API keys that chats belong to")
    max_context: int = option(32_768, "maximum tokens of a chat; default: the engine's context")
    seed: int = option(0, "seed of all random choices")
    vocab_size: int = ANY_TOKEN

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (field.name not in _MAY_BE_ZERO and not value):  # NaN is not
                least = "at least" if field.name in _MAY_BE_ZERO else "above"
                raise ConfigError(f"{field.name} must be {least} 0, not {value}")
            most = _MOST.get(field.name, LARGEST)
            if value > most:
                raise ConfigError(f"{field.name} must be at most {most:,.0f}, not {value}")
        if self.system_prompts and self.system_tokens >= self.max_context:
            raise ConfigError(
                f"system_tokens ({self.system_tokens}) leaves no room for a question in max_context "
                f"({self.max_context}): lower the first or raise the second"
            )

    def describe(self) -> str:
        prompts = f"{self.system_prompts} system prompts of {self.system_tokens} tokens"
        return (
            f"{self.chats_per_second:g} chats a second for {self.seconds:g} s, {self.turns:g} turns, {prompts}, "
            f"questions of {self.question_tokens} and answers of {self.answer_tokens} tokens, seed {self.seed}"
        )

    def arrivals(self) -> Iterator[Arrival]:
        rng = Random(f"arrivals {self.seed}")
        time, number = 0.0, 0
        while True:
            time += self._gap(rng)
            if time >= self.seconds:
                return
            first = _Chat(self, number).ask(time)
            if first is not None:
                yield first
            number += 1

    def _gap(self, rng: Random) -> float:
        if self.burstiness < SMALLEST_BURSTINESS:
            return 1 / self.chats_per_second
        shape = self.burstiness**-2
        return rng.gammavariate(shape, 1 / (shape * self.chats_per_second))


class _Chat:
    """One chat, up to its current turn."""

    __slots__ = ("_load", "_number", "_rng", "_said", "_tenant", "_turn", "_turns")

    def __init__(self, load: Chats, number: int) -> None:
        self._load = load
        self._number = number
        self._rng = rng = Random(load.seed * 1_000_003 + number)
        self._turn = 0
        self._turns = 1
        while load.turns > 1 and self._turns < load.max_context and rng.random() < 1 - 1 / load.turns:
            self._turns += 1
        self._tenant = f"key-{rng.randrange(load.tenants)}" if load.tenants > 1 else ""
        self._said = array(INT32)
        if load.system_prompts:
            key = _key(load.seed, 0, rng.randrange(load.system_prompts))
            self._said = make_tokens(key, load.system_tokens, load.vocab_size)

    def ask(self, time: float) -> Arrival | None:
        """The next request, with the conversation so far; None if the chat is over."""
        load = self._load
        question, answer = self._length(load.question_tokens), self._length(load.answer_tokens)
        if self._turn == self._turns or len(self._said) + question + answer > load.max_context:
            return None
        self._turn += 1
        said = make_tokens(_key(load.seed, self._number + 1, self._turn), question + answer, load.vocab_size)
        asked = Arrival(
            time, f"{self._number}-{self._turn}", self._said + said[:question], said[question:], self._tenant
        )

        def answered(ended: float) -> Arrival | None:
            self._said = asked.prompt + asked.answer
            return self.ask(ended + self._rng.expovariate(1.0) * load.think_seconds)

        asked.follow = answered
        return asked

    def _length(self, mean: int) -> int:
        spread = self._load.spread
        drawn = self._rng.lognormvariate(math.log(mean) - spread * spread / 2, spread)
        return max(1, min(round(drawn), LONGEST * mean))


def _key(seed: int, chat: int, turn: int) -> int:
    """Key of a turn's random tokens; turn numbers are below 2**16."""
    return (seed << 64 | chat << 16 | turn) * 2 + 1
