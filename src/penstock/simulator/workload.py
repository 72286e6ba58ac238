"""Workloads of a simulated fleet: requests with arrival times and tokens, and their follow-up requests.

Token ids represent the content: equal prefixes are found in the prefix cache, as in a real engine.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.api.request import Image
from penstock.dataclass import dataclass

INT32 = "i"
ANY_TOKEN = 2**31 - 1
"""A vocabulary for engines without a model, in which no two texts are equal by chance."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A request and its arrival time."""

    time: float
    """Seconds since the beginning."""
    name: str
    prompt: "array[int]"
    answer: "array[int]"
    """The tokens to generate, at least one; with a real engine its own tokens replace them."""
    tenant: str = ""
    namespace: str = ""
    priority: int = 0
    images: tuple[Image, ...] = ()
    """Without pixels."""
    follow: "Callable[[float], Arrival | None] | None" = None
    """Called when the answer is complete; returns the follow-up request, if any."""


class Workload(Protocol):
    """A reproducible source of requests."""

    def arrivals(self) -> Iterator[Arrival]:
        """The arrivals that do not wait for an answer, by ascending time, generated lazily."""

    def describe(self) -> str:
        """A short description for the terminal."""


def make_tokens(key: int, count: int, vocab_size: int = ANY_TOKEN) -> "array[int]":
    """Pseudo-random tokens for a key; a shorter sequence is a prefix of a longer one.

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
