"""A draft model by a runner that checks each plan: what it guesses, what it keeps, what it gives back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.draft_model import DraftModel
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.plan import StepPlan, StepResult
from penstock.core.sequence import Sequence
from penstock.core.speculation import Speculation
from tests.core.fakes import FakeRunner, digest, expected_answer, make_request, make_scheduler, run_to_end
from tests.core.images import make_image, placeholders


class Small(FakeRunner):
    """Says mostly what the larger model says: other tokens after one prefix in `odd`."""

    def __init__(self, num_blocks: int, odd: int = 10**9) -> None:
        super().__init__(num_blocks, 4)
        self.odd = odd
        self.plans: list[list[int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(list(plan.forward.query_lens))
        assert all(seq.sequence_id < 0 for seq in plan.samples.sequences), "its own in the sampler's eyes"
        return super().execute(plan)

    def next_token(self, prefix: int, index: int) -> int:
        token = super().next_token(prefix, index)
        return token if prefix % self.odd else (token + 1) % self.vocab


def draft_model(num_blocks: int = 64, odd: int = 10**9, budget: int = 16) -> tuple[DraftModel, Small, KVManager]:
    runner, kv = Small(num_blocks, odd), KVManager((CacheGroup(num_blocks),), 4, 64)
    return DraftModel(runner, kv, budget), runner, kv


def text_of(tokens: list[int], name: str = "a", ordinal: int = 0) -> Sequence:
    return Sequence(make_request(name, tokens, 100, stop_token_ids=()), 0, ordinal)


def continuation(runner: FakeRunner, seq: Sequence, count: int) -> list[int]:
    text = seq.tokens.tolist()
    for _ in range(count):
        text.append(runner.next_token(digest(text), seq.index))
    return text[len(seq.tokens) :]


def test_a_text_is_caught_up_with_and_then_a_token_is_guessed_a_pass() -> None:
    model, runner, _ = draft_model()
    seq = text_of([5, 6, 7, 8, 9])
    assert model.propose([(seq, 3)])[0].tolist() == continuation(runner, seq, 3)
    assert runner.plans == [[5], [1], [1]]


def test_nothing_is_guessed_for_a_text_with_images() -> None:
    model, runner, _ = draft_model()
    image = make_image(1, start=1)
    seen = Sequence(make_request("i", [5, *placeholders(image), 6], 100, images=(image,)), 0, 1)
    seq = text_of([5, 6, 7])
    drafts = model.propose([(seen, 2), (seq, 2)])
    assert [draft.tolist() for draft in drafts] == [[], continuation(runner, seq, 2)]


def test_what_was_guessed_right_is_not_computed_again_and_what_was_wrong_is() -> None:
    model, runner, _ = draft_model()
    seq = text_of([5, 6, 7, 8, 9])
    drafted = model.propose([(seq, 4)])[0].tolist()
    seq.tokens.extend([*drafted[:2], (drafted[2] + 1) % 20])
    runner.plans.clear()
    assert model.propose([(seq, 2)])[0].tolist() == continuation(runner, seq, 2)
    assert runner.plans == [[1], [1]]
    seq.tokens.extend(continuation(runner, seq, 3))  # two were guessed, of which the last was not computed
    runner.plans.clear()
    model.propose([(seq, 1)])
    assert runner.plans == [[2]]


def test_sequences_are_guessed_for_together_each_as_far_as_is_wanted() -> None:
    model, runner, _ = draft_model(budget=32)
    texts = [text_of([number, 3], f"r{number}", number) for number in range(3)]
    drafts = model.propose([(seq, limit) for seq, limit in zip(texts, (1, 3, 2), strict=True)])
    for seq, draft, limit in zip(texts, drafts, (1, 3, 2), strict=True):
        assert draft.tolist() == continuation(runner, seq, limit)
    assert runner.plans == [[2, 2, 2], [1, 1], [1]]


def test_a_long_text_is_caught_up_with_over_several_steps_within_the_budget() -> None:
    model, runner, _ = draft_model(budget=16)
    seq = text_of(list(range(40)))
    lengths = [len(model.propose([(seq, 2)])[0]) for _ in range(3)]
    assert lengths == [0, 0, 2]
    assert all(sum(plan) <= 16 for plan in runner.plans)


def test_texts_with_a_common_beginning_share_its_blocks() -> None:
    model, runner, kv = draft_model()
    beginning = list(range(10))
    model.propose([(text_of([*beginning, 1]), 1)])
    runner.plans.clear()
    model.propose([(text_of([*beginning, 2], "b", 1), 1)])
    assert runner.plans == [[3]]
    assert kv.hit_tokens == 8


def test_without_blocks_those_that_nobody_asks_about_give_up_theirs_and_else_nothing_is_guessed() -> None:
    model, runner, kv = draft_model(num_blocks=4, budget=32)
    old, new, third = (text_of([number] * 8, f"r{number}", number) for number in range(3))
    assert len(model.propose([(old, 2)])[0]) == 2
    assert len(model.propose([(new, 2)])[0]) == 2
    together = model.propose([(new, 2), (third, 2), (old, 2)])
    assert [len(draft) for draft in together] == [1, 1, 0], "each text has two blocks; a second token wants more"
    assert model.propose([(old, 2)])[0].tolist() == continuation(runner, old, 2)
    for seq in (old, new, third):
        model.forget_sequence(seq)
        model.forget_sequence(seq)
    assert kv.num_available == 4


@given(
    odd=st.integers(2, 9),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 9)), max_size=25),
    num_blocks=st.integers(3, 20),
)
def test_whatever_comes_true_it_guesses_what_it_would_say_and_its_blocks_are_conserved(
    odd: int, steps: list[tuple[int, int, int]], num_blocks: int
) -> None:
    """The runner finds out whoever reads a slot that was written for other tokens."""
    model, runner, kv = draft_model(num_blocks, odd)
    texts = [text_of([number, number + 1, 5], f"r{number}", number) for number in range(4)]
    truth = FakeRunner(1, 4)
    for place, limit, came in steps:
        wanted = [(texts[place], limit), (texts[(place + 1) % 4], 2)]
        for (seq, most), draft in zip(wanted, model.propose(wanted), strict=True):
            assert draft.tolist() == continuation(runner, seq, len(draft))
            assert len(draft) <= most
        kv.check_integrity([shadow.seq for shadow in model._shadows.values()])
        texts[place].tokens.extend(continuation(truth, texts[place], came))
    for seq in texts:
        model.forget_sequence(seq)
    assert kv.num_available == num_blocks


@pytest.mark.parametrize(("odd", "stop"), [(10**9, ()), (3, ()), (3, (7,))])
def test_with_the_scheduler_answers_stay_and_steps_are_saved(odd: int, stop: tuple[int, ...]) -> None:
    model, _, kv = draft_model(num_blocks=200, odd=odd, budget=64)
    larger = FakeRunner(200, 4)
    scheduler = make_scheduler(num_blocks=200, budget=64, speculation=Speculation([model], 6, lambda: 0.0))
    requests = [make_request(f"r{n}", [n] * (n + 1), 40, n=1 + n % 2, stop_token_ids=stop) for n in range(6)]
    for request in requests:
        scheduler.add_request(request)
    collected = run_to_end(scheduler, larger, max_steps=200)
    for request in requests:
        for index in range(request.params.n):
            answer = collected.tokens[request.request_id, index], collected.endings[request.request_id, index][0]
            assert answer == expected_answer(larger, request, index)
    assert scheduler.num_accepted > 20
    assert kv.num_available == 200
