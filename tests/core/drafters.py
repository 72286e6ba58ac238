"""Drafters for tests, and a clock on which steps take what they are said to."""

import random
from array import array

from penstock.core.plan import StepPlan, StepResult
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft
from tests.core.fakes import FakeRunner, digest


class SkilledDrafter:
    """Guesses as many tokens as it may, each right with a chance of `skill`."""

    def __init__(self, runner: FakeRunner, skill: float) -> None:
        self.runner, self.skill, self.rng = runner, skill, random.Random(len(str(skill)))
        self.asked: list[list[str]] = []
        self.forgotten: list[str] = []

    @property
    def free(self) -> bool:
        return True

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        self.asked.append([seq.request_id for seq, _ in wanted])
        return [self._propose(seq, self._count(limit)) for seq, limit in wanted]

    def _count(self, limit: int) -> int:
        return limit

    def _propose(self, seq: Sequence, count: int) -> Draft:
        prompt = self.runner.prompt_contents(seq.request)
        text = prompt + seq.tokens[len(prompt) :].tolist()
        for _ in range(count):
            right = self.rng.random() < self.skill
            token = self.runner.next_token(digest(text), seq.index)
            text.append(token if right else (token + 1) % self.runner.vocab)
        return array("i", text[len(seq.tokens) :])

    def forget_sequence(self, seq: Sequence) -> None:
        self.forgotten.append(seq.request_id)


class WhimsicalDrafter(SkilledDrafter):
    """Guesses as many tokens as it likes, and says at random that it is free."""

    @property
    def free(self) -> bool:
        return self.rng.random() < 0.5

    def _count(self, limit: int) -> int:
        return self.rng.randint(0, limit)


class UnsteadyClock:
    """Of a machine on which the same takes now this long, now that."""

    def __init__(self) -> None:
        self.now, self.rng = 0.0, random.Random(5)

    def __call__(self) -> float:
        self.now += self.rng.choice([0.0, 0.001, 0.001, 0.002, 0.5])
        return self.now


class TimedRunner:
    """Lets a step take `fixed` seconds, and `token` for each of its tokens, on a clock of its own."""

    def __init__(self, runner: FakeRunner, fixed: float, token: float) -> None:
        self.runner, self.fixed, self.token, self.now = runner, fixed, token, 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += self.fixed + self.token * len(plan.forward.token_ids)
        return self.runner.execute(plan)

    def clock(self) -> float:
        return self.now
