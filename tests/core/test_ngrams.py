"""Prompt lookup: where a text repeats itself."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.ngrams import SIZE, NgramDrafter
from penstock.core.sequence import Sequence
from tests.core.fakes import make_request
from tests.core.images import make_image, placeholders


def text_of(tokens: list[int], name: str = "a", ordinal: int = 0) -> Sequence:
    return Sequence(make_request(name, tokens, 1000), 0, ordinal)


def guess(drafter: NgramDrafter, seq: Sequence, limit: int = 5) -> list[int]:
    return drafter.propose([(seq, limit)])[0].tolist()


def test_what_followed_the_last_tokens_before_is_guessed_again() -> None:
    seq = text_of([*range(10, 30), 12, 13, 14])
    assert guess(NgramDrafter(), seq) == [15, 16, 17, 18, 19]
    assert guess(NgramDrafter(), seq, 2) == [15, 16]


def test_of_several_places_the_last_one_counts() -> None:
    assert guess(NgramDrafter(), text_of([1, 2, 3, 40, 1, 2, 3, 50, 9, 1, 2, 3]), 1) == [50]


def test_a_text_without_a_repeated_run_gives_no_idea() -> None:
    for tokens in ([], [1], [1, 2, 3], [1, 2, 3, 9, 2, 3], list(range(50))):
        assert guess(NgramDrafter(), text_of([7, *tokens])) == []


def test_a_loop_goes_on_in_the_draft() -> None:
    assert guess(NgramDrafter(), text_of([8, 1, 2, 3, 4, 1, 2, 3]), 9) == [4, 1, 2, 3, 4, 1, 2, 3, 4]
    assert guess(NgramDrafter(), text_of([5, 5, 5, 5]), 3) == [5, 5, 5]


def test_a_guess_ends_before_an_image() -> None:
    image = make_image(1, start=5)
    tokens = [1, 2, 3, 8, 9, *placeholders(image), 1, 2, 3]
    seq = Sequence(make_request("a", tokens, 1000, images=(image,)), 0, 0)
    assert guess(NgramDrafter(), seq) == [8, 9]


def test_a_place_is_followed_as_long_as_it_is_right_though_a_later_one_was_found() -> None:
    drafter, seq = NgramDrafter(), text_of([1, 2, 3, 4, 5, 6, 7, 0, 4, 5, 6, 99, 0, 1, 2, 3])
    assert guess(drafter, seq) == [4, 5, 6, 7, 0]
    seq.tokens.extend([4, 5, 6])
    assert guess(drafter, seq)[0] == 7, "alone, the last three tokens speak for 99"
    seq.tokens.extend([99, 0, 4, 5, 6])
    assert guess(drafter, seq)[0] == 99


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), data=st.data())
def test_however_a_text_came_the_guess_is_made_from_it(tokens: list[int], data: st.DataObject) -> None:
    """A guess continues a run equal to the last tokens; if there is one, there is a guess."""
    drafter, seq, done = NgramDrafter(), text_of(tokens[:1]), 1
    while done < len(tokens):
        step = data.draw(st.integers(1, 40))
        seq.tokens.extend(tokens[done : done + step])
        done += step
        drafted = guess(drafter, seq, 1)
    text = seq.tokens.tolist()
    runs = {tuple(text[end - SIZE : end]): text[end] for end in range(SIZE, len(text))}
    followers = {text[end] for end in range(SIZE, len(text)) if text[end - SIZE : end] == text[-SIZE:]}
    if len(text) > 1:
        assert bool(drafted) == (tuple(text[-SIZE:]) in runs and len(text) > SIZE)
        assert set(drafted) <= followers


def test_bytes_that_are_parts_of_four_tokens_are_no_run() -> None:
    """As bytes, 256 256 256 256 has 1 1 1 in it, one byte further."""
    assert guess(NgramDrafter(), text_of([256] * 9 + [1, 1, 1])) == []
    assert guess(NgramDrafter(), text_of([1, 1, 1, 9, *[256] * 4, 8, 1, 1, 1]), 1) == [9]


def test_a_run_is_found_however_far_back_it_stands() -> None:
    assert guess(NgramDrafter(), text_of([*range(50_000), 12, 13, 14]), 2) == [15, 16]


def test_the_state_is_the_texts_alone() -> None:
    drafter, tokens = NgramDrafter(), [*range(10, 60), 12, 13, 14]
    one, other = text_of(tokens), text_of([*range(90), 5, 6, 7], "b", ordinal=1)
    together = [draft.tolist() for draft in drafter.propose([(one, 3), (other, 3)])]
    assert together == [guess(NgramDrafter(), one, 3), guess(NgramDrafter(), other, 3)]
    drafter.forget_sequence(one)
    drafter.forget_sequence(one)
    assert guess(drafter, one, 3) == together[0]
