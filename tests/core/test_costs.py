"""What is learned of steps and guesses."""

import pytest

from penstock.core.costs import WINDOW, Acceptance, StepCosts


def test_between_measured_sizes_lie_lines_and_beyond_them_they_go_on() -> None:
    costs = StepCosts()
    assert not costs.known
    for size, seconds in ((1, 1.0), (5, 1.4), (13, 3.0)):
        costs.observe(size, seconds)
    assert [costs.seconds(size) for size in (1, 3, 5, 9, 13)] == pytest.approx([1.0, 1.2, 1.4, 2.2, 3.0])
    assert costs.seconds(25) == pytest.approx(5.0)


def test_with_one_size_known_a_token_more_costs_a_little_more() -> None:
    costs = StepCosts()
    costs.observe(8, 2.0)
    assert costs.seconds(7) < 2.0 < costs.seconds(9) < costs.seconds(20) < 4.0
    assert costs.seconds(1) > 1.0


def test_a_busy_moment_is_no_cost_but_a_change_is_noticed() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.0, 90.0, 1.0, 1.0):
        costs.observe(1, seconds)
    assert costs.seconds(1) == 1.0
    for _ in range(WINDOW):
        costs.observe(1, 2.0)
    assert costs.seconds(1) == 2.0


def test_no_step_takes_no_time_whatever_the_clock_says() -> None:
    costs = StepCosts()
    costs.observe(4, 0.0)
    costs.observe(400, 0.0)
    assert costs.seconds(1) > 0


def test_large_sizes_are_kept_in_classes() -> None:
    costs = StepCosts()
    for size in range(1, 5000):
        costs.observe(size, 1.0 + size)
    assert len(costs._sizes) < 90
    assert costs.seconds(4000) == pytest.approx(4001, rel=0.15)


def test_a_chance_is_what_is_known_beforehand_until_something_is_learned() -> None:
    acceptance = Acceptance(0.8)
    assert acceptance.chance(0.3) == pytest.approx(0.3)
    acceptance.learn(20, wrong=False)
    assert acceptance.chance(0.3) > 0.85
    for _ in range(12):
        acceptance.learn(0, wrong=True)
    assert acceptance.chance(0.3) < 0.2
    for _ in range(1000):
        acceptance.fade()
    assert acceptance.chance(0.3) == pytest.approx(0.3, abs=0.01)
