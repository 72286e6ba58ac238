"""The state of sequence slots, against a recount of each history."""

from array import array
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.sampling_params import ResolvedParams
from penstock.core.plan import SampleBatch, SampledSequence, StepPlan, StepResult
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation
from penstock.kernels.sampling import CountTable
from penstock.sampling.state import SlotStates
from tests.core.drafters import UnsteadyClock, WhimsicalDrafter
from tests.core.fakes import FakeRunner, make_scheduler
from tests.core.test_scheduler_properties import EVENTS, Traffic
from tests.sampling.batches import params


def counted(table: CountTable) -> dict[int, tuple[int, int]]:
    """The counts in prompt and answer, and in the answer, by token."""
    assert sorted(set(table.tokens)) == table.tokens.tolist(), "ascending, each once"
    rows = zip(*table, strict=True)
    return {token: (total, answer) for token, total, answer in rows if total}


def recounted(sequence: SampledSequence, position: int) -> dict[int, tuple[int, int]]:
    totals = Counter(sequence.tokens[:position])
    answers = Counter(sequence.tokens[sequence.prompt_len : position])
    return {token: (count, answers[token]) for token, count in totals.items()}


class CountingRunner(FakeRunner):
    """Keeps the state of the slots as the sampler does, and compares it in each step."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        super().__init__(num_blocks, 4)
        self.sampling = SlotStates(max_num_seqs)

    def execute(self, plan: StepPlan) -> StepResult:
        batch, rows = plan.samples, list(range(len(plan.samples)))
        self.sampling.assign(batch)
        tables = self.sampling.counts(batch, rows)
        for sequence, position, table in zip(batch.sequences, batch.positions, tables, strict=True):
            assert counted(table) == recounted(sequence, position)
        self.sampling.drop_drafts(batch, rows)
        return super().execute(plan)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=EVENTS,
    num_blocks=st.integers(6, 20),
    max_num_seqs=st.integers(3, 6),
    extra_budget=st.integers(0, 10),
    skill=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
)
def test_counts_equal_a_recount_whatever_happens_to_the_sequences(
    events: list, num_blocks: int, max_num_seqs: int, extra_budget: int, skill: float | None
) -> None:
    """Chunks, preemption, siblings, beams, drafts right and wrong, aborts, and engines that are replaced."""
    budget, runner = max_num_seqs + extra_budget, CountingRunner(num_blocks, max_num_seqs)

    def make() -> Scheduler:
        speculation = None if skill is None else Speculation([WhimsicalDrafter(runner, skill)], 5, UnsteadyClock())
        return make_scheduler(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, policy="fair", speculation=speculation
        )

    traffic = Traffic(make, runner, budget)
    traffic.play(events)
    traffic.check()


def batch_at(sequence: SampledSequence, *positions: int) -> SampleBatch:
    return SampleBatch([sequence] * len(positions), [0] * len(positions), list(positions))


def counts_at(states: SlotStates, sequence: SampledSequence, *positions: int) -> list[dict[int, tuple[int, int]]]:
    """The counts before each of these positions, in one step."""
    batch, rows = batch_at(sequence, *positions), list(range(len(positions)))
    states.assign(batch)
    tables = [counted(table) for table in states.counts(batch, rows)]
    states.drop_drafts(batch, rows)
    return tables


def sequence_of(
    tokens: list[int], prompt_len: int, slot: int = 0, wanted: ResolvedParams | None = None
) -> SampledSequence:
    return SampledSequence(slot, 0, wanted or params(), prompt_len, array("i", tokens))


def test_a_new_token_is_added_and_the_history_is_not_counted_again() -> None:
    states, sequence = SlotStates(1), sequence_of([5, 5, 3], 2)
    assert counts_at(states, sequence, 3) == [{5: (2, 0), 3: (1, 1)}]
    sequence.tokens[0] = 9  # which a recount would see
    sequence.tokens.extend([5, 1])
    assert counts_at(states, sequence, 5) == [{5: (3, 1), 3: (1, 1), 1: (1, 1)}]


def test_drafts_count_for_the_rows_behind_them_and_leave_nothing() -> None:
    states, sequence = SlotStates(1), sequence_of([5, 3, 8, 8], 1)
    rows = counts_at(states, sequence, 2, 3, 4)
    assert rows == [recounted(sequence, position) for position in (2, 3, 4)]
    del sequence.tokens[2:]  # both were wrong
    sequence.tokens.append(7)
    assert counts_at(states, sequence, 3) == [{5: (1, 0), 3: (1, 1), 7: (1, 1)}]


def test_a_slot_that_is_assigned_anew_is_counted_anew_for_the_same_tokens_too() -> None:
    states, first = SlotStates(2), sequence_of([1, 2, 3], 3, slot=1)
    counts_at(states, first, 3)
    first.tokens[:] = array("i", [4, 4, 4])
    again = SampledSequence(1, 0, first.params, 3, first.tokens)
    assert counts_at(states, again, 3) == [{4: (3, 0)}]


def test_the_controls_are_those_of_the_slots_latest_sequence() -> None:
    states = SlotStates(3)
    states.assign(batch_at(sequence_of([1], 1, 2, params(temperature=0.0, repetition_penalty=1.5, logprobs=3)), 1))
    wanted = params(temperature=0.5, top_k=7, seed=2**64 - 1, min_tokens=4)
    state = states.assign(batch_at(sequence_of([1], 1, 2, wanted), 1))
    assert state.controls.tolist() == [[0.5, 7, 1, 0, 1]]
    assert state.seeds.tolist() == [2**64 - 1]
    assert (state.penalized, state.logprobs, state.first_ends) == ([], [], [(0, 5)])


def test_rows_that_trade_places_trade_their_controls() -> None:
    states = SlotStates(2)
    cold, hot = sequence_of([1], 1, 0, params(temperature=0.25)), sequence_of([1], 1, 1, params(temperature=2.0))
    for order in ([cold, hot], [hot, cold], [hot], [cold, hot]):
        state = states.assign(SampleBatch(order, [0] * len(order), [1] * len(order)))
        assert state.controls[:, 0].tolist() == [sequence.params.temperature for sequence in order]
