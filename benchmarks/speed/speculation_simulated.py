"""What the choice of draft lengths gains, in virtual time: tokens a second relative to a run without speculation.

    python -m benchmarks.speed.speculation_simulated      (bars: geometric mean 1.2, worst 0.93)

Steps cost what several kinds of models and machines make of their tokens, with noise, outliers and a memory of two
speeds that take turns; guesses are right with given chances. So the decisions of `core/speculation.py` are measured
alone, the same on every machine and under any load; `speculation.py` measures the rest. Exits with 1 if a
bar is missed.
"""

import itertools
import math
import statistics
import sys
from array import array
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from penstock.core.speculation import Draft, Speculation

MEAN_BAR, WORST_BAR = 1.2, 0.93
ASK_SECONDS = 1.2e-5
"""Of a guess by n-grams."""
COSTS = {"bf16": (0.03, 1.2e-3), "int4": (0.011, 1.3e-3), "demo": (1.1e-3, 1.1e-4), "flat": (0.02, 1e-4)}
COSTS["steep"] = (0.01, 5e-3)
"""Seconds of a step's weights, and of each token."""
TOKENS = {1: 1500, 8: 400, 32: 250}
"""Tokens of each sequence, by how many there are."""
Skill = Callable[[int, int], float | None]
"""(sequence, position) -> how likely a guessed token is right; None: there is no guess."""


def _always(chance: float) -> Skill:
    return lambda seq, at: chance


SKILLS: dict[str, Skill] = {
    **{f"{chance:.0%} right": _always(chance) for chance in (0.95, 0.8, 0.5, 0.2, 0.0)},
    "no guesses": lambda seq, at: None,
    "right in bursts": lambda seq, at: 0.95 if at // 60 % 3 == 0 else None if at // 7 % 2 else 0.0,
    "every second sequence": lambda seq, at: 0.95 if seq % 2 else 0.05,
}


class Machine:
    """Virtual time, and what a step takes."""

    def __init__(self, kind: str, seed: int) -> None:
        self.now = 0.0
        self._floor, self._token = COSTS[kind]
        self._rng = Random(seed)

    def clock(self) -> float:
        return self.now

    def step(self, num_tokens: int) -> float:
        """Seconds of a step."""
        seconds = max(self._floor, 0.9 * self._floor + self._token * num_tokens)
        slow = 1.35 if int(self.now / 3) % 2 else 1.0
        return seconds * slow * self._rng.lognormvariate(0, 0.04) * (3.0 if self._rng.random() < 0.01 else 1.0)


def token_at(seq: int, position: int) -> int:
    return (seq * 7919 + position * 31) % 1000 * 2


class Scripted:
    """Guesses each token right with a chance."""

    free = True

    def __init__(self, machine: Machine, skill: Skill, seed: int) -> None:
        self._machine, self._skill, self._rng = machine, skill, Random(seed)

    def propose(self, wanted: list[tuple[Any, int]]) -> list[Draft]:
        self._machine.now += ASK_SECONDS * len(wanted)
        return [self._guess(seq, limit) for seq, limit in wanted]

    def _guess(self, seq: Any, limit: int) -> Draft:
        done = len(seq.tokens)
        chance = self._skill(seq.sequence_id, done)
        if chance is None:
            return array("i")
        right = (token_at(seq.sequence_id, done + i) for i in range(limit))
        return array("i", [token if self._rng.random() < chance else token ^ 1 for token in right])

    def forget_sequence(self, seq: Any) -> None:
        pass


def new_sequence(number: int) -> SimpleNamespace:
    tokens = array("i", [0] * 64)
    return SimpleNamespace(sequence_id=number, tokens=tokens, max_length=10**9, siblings=[], beams=None)


def rate(kind: str, batch: int, skill: Skill | None, seed: int) -> float:
    """Tokens a second; without speculation if there is no skill."""
    machine = Machine(kind, seed)
    drafters = [] if skill is None else [Scripted(machine, skill, seed)]
    speculation = Speculation(drafters, 16, machine.clock)
    for size in {1, batch, 64, min(64 * batch, 2048)}:  # steps of prompts, and of fewer sequences
        speculation.begin_step()
        machine.now += machine.step(size)
        speculation.end_step(size)
    began, sequences = machine.now, [new_sequence(number) for number in range(batch)]
    while sum(len(seq.tokens) - 64 for seq in sequences) < TOKENS[batch] * batch:
        speculation.begin_step()
        step: Any = SimpleNamespace(num_decodes=batch, sequences=sequences, query_lens=[1] * batch)
        drafts = dict(speculation.propose(step, 2048 - batch))
        num_tokens = batch + sum(map(len, drafts.values()))
        machine.now += machine.step(num_tokens)
        for place, seq in enumerate(sequences):
            for guess in drafts.get(place, ()):
                if guess != token_at(place, len(seq.tokens)):
                    break
                seq.tokens.append(guess)
            seq.tokens.append(token_at(place, len(seq.tokens)))
        speculation.end_step(num_tokens)
    return sum(len(seq.tokens) - 64 for seq in sequences) / (machine.now - began)


def main() -> int:
    ratios = []
    for kind, batch, (name, skill) in itertools.product(COSTS, TOKENS, SKILLS.items()):
        gains = [rate(kind, batch, skill, seed) / rate(kind, batch, None, seed) for seed in (1, 2)]
        ratios.append(statistics.mean(gains))
        print(f"{kind}, {batch} sequences, {name}: {ratios[-1]:.3f}", flush=True)
    mean, worst = math.exp(statistics.mean(map(math.log, ratios))), min(ratios)
    print(f"geometric mean {mean:.3f} (bar {MEAN_BAR}), worst {worst:.3f} (bar {WORST_BAR})")
    return int(mean < MEAN_BAR or worst < WORST_BAR)


if __name__ == "__main__":
    sys.exit(main())
