"""Workloads of a simulated fleet: requests with arrivals and tokens, and the requests that follow each.

Tokens stand for content: equal ones are found in the prefix cache, as in a real engine.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

INT32 = "i"
ANY_TOKEN = 2**31 - 1
"""A vocabulary for engines without a model, in which no two texts are equal by chance."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A request, and when it comes."""

    time: float
    """Seconds since the beginning."""
    name: str
    prompt: "array[int]"
    answer: "array[int]"
    """The tokens to generate, at least one; with a real engine its own tokens replace them."""
    tenant: str = ""
    namespace: str = ""
    priority: int = 0
    follow: "Callable[[float], Arrival | None] | None" = None
    """Given when the answer was whole: what its reader asks next, if anything."""


class Workload(Protocol):
    """A source of requests that gives the same ones each time."""

    def arrivals(self) -> Iterator[Arrival]:
        """The arrivals that do not wait for an answer, by ascending time, generated lazily."""

    def describe(self) -> str:
        """A short description for the terminal."""


def make_tokens(key: int, count: int, vocab_size: int = ANY_TOKEN) -> "array[int]":
    """Tokens that differ for each key; a shorter run is the beginning of a longer one.

    The mixing function is that of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    import numpy as np  # here, as the command line reads the options of chats without it

    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) + np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    tokens = array(INT32)
    tokens.frombytes((x % np.uint64(vocab_size)).astype(np.int32).tobytes())
    return tokens
