"""With guesses the distribution is the model's, exactly: by statistics, beside the proof that nothing changes at all.

The model is a Markov chain whose probabilities are known, and draws as the sampler does: by inversion of a number in
[0, 1) that its seed, index and position give.
"""

import itertools
import math
from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.core.plan import StepPlan, StepResult
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft, Speculation
from penstock.sampling.random import uniforms
from tests.core.fakes import make_request, make_scheduler, run_to_end

CHAIN = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.35, 0.05]])
GUESSED = np.array([[0.3, 0.3, 0.4], [0.3, 0.3, 0.4], [0.3, 0.3, 0.4]])
LENGTH, NUM_SEEDS, N = 6, 50, 50


_KEYS = list(itertools.product(range(NUM_SEEDS), range(N), range(LENGTH + 2)))
NUMBERS = dict(zip(_KEYS, uniforms(*zip(*_KEYS, strict=True)).tolist(), strict=True))
"""By (seed, index, position)."""


def draw(chain: np.ndarray, before: int, uniform: float) -> int:
    first, second, _ = chain[before]
    return int(uniform >= first) + int(uniform >= first + second)


class MarkovRunner:
    """Samples what follows each row's token."""

    def execute(self, plan: StepPlan) -> StepResult:
        samples = plan.samples
        seeds = [seq.params.seed for seq in samples.sequences]
        keys = zip(seeds, samples.indices, samples.positions, strict=True)
        tokens = [plan.forward.token_ids[row] for row in plan.forward.sampled_rows]
        return StepResult([draw(CHAIN, token, NUMBERS[key]) for token, key in zip(tokens, keys, strict=True)])


class MarkovDrafter:
    """Guesses by another chain: with the numbers that the model will draw by, with its own, or always token 2."""

    free = True

    def __init__(self, numbers: str) -> None:
        self.numbers, self.rng = numbers, np.random.default_rng(1)
        self.guesses: list[tuple[tuple[str, int], int, int, int]] = []  # (answer, place in it, token before, guess)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: Sequence, limit: int) -> Draft:
        text = array("i", seq.tokens[-1:])
        for place in range(limit):
            shared = NUMBERS[seq.params.seed, seq.index, len(seq.tokens) + place]
            uniform = {"shared": shared, "own": self.rng.random(), "none": 0.95}[self.numbers]
            text.append(draw(GUESSED, text[-1], uniform))
        place = len(seq.tokens) - seq.num_prompt_tokens
        self.guesses.append(((seq.request_id, seq.index), place, text[0], text[1]))
        return text[1:]

    def forget_sequence(self, seq: Sequence) -> None:
        pass


def answers(drafter: MarkovDrafter | None) -> dict[tuple[str, int], list[int]]:
    speculation = None if drafter is None else Speculation([drafter], 60, lambda: 0.0)
    scheduler = make_scheduler(num_blocks=800, max_num_seqs=100, budget=400, speculation=speculation)
    for seed in range(NUM_SEEDS):
        request = make_request(f"{seed}", [0], LENGTH, n=N, stop_token_ids=())
        scheduler.add_request(replace(request, params=replace(request.params, seed=seed)))
    collected = run_to_end(scheduler, MarkovRunner())
    assert drafter is None or scheduler.num_accepted > 500
    return collected.tokens


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], list[int]]:
    return answers(None)


@pytest.mark.parametrize("numbers", ["shared", "own", "none"])
def test_answers_are_those_without_guesses_and_distributed_as_the_model_says(
    plain: dict[tuple[str, int], list[int]], numbers: str
) -> None:
    drafter = MarkovDrafter(numbers)
    speculated = answers(drafter)
    assert speculated == plain
    _check_distribution(speculated)
    _check_acceptance(drafter, speculated)


def _check_distribution(speculated: dict[tuple[str, int], list[int]]) -> None:
    """Three tokens in the middle of each answer."""
    observed = Counter(tuple(tokens[2:5]) for tokens in speculated.values())
    begin = np.linalg.matrix_power(CHAIN, 3)[0]
    statistic = 0.0
    for first, second, third in itertools.product(range(3), repeat=3):
        expected = len(speculated) * begin[first] * CHAIN[first, second] * CHAIN[second, third]
        statistic += (observed[first, second, third] - expected) ** 2 / expected
    assert statistic < 54.05  # chi-squared, 26 degrees of freedom, p = 0.001


def _check_acceptance(drafter: MarkovDrafter, speculated: dict[tuple[str, int], list[int]]) -> None:
    """A guess is right as often as the model says its token, or as the parts of [0, 1) overlap that mean it to both."""
    right: dict[tuple[int, int], list[bool]] = {}
    for answer, place, before, guess in drafter.guesses:
        right.setdefault((before, guess), []).append(speculated[answer][place] == guess)
    bounds, guessed_bounds = (np.cumsum(np.pad(chain, ((0, 0), (1, 0))), axis=1) for chain in (CHAIN, GUESSED))
    for (before, guess), step_update in right.items():
        chance = CHAIN[before, guess]
        if drafter.numbers == "shared":
            low = max(bounds[before, guess], guessed_bounds[before, guess])
            high = min(bounds[before, guess + 1], guessed_bounds[before, guess + 1])
            chance = max(0.0, high - low) / GUESSED[before, guess]
        deviation = math.sqrt(chance * (1 - chance) / len(step_update))
        assert abs(np.mean(step_update) - chance) <= 4 * deviation + 1e-9
