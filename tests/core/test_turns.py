"""Turns between tenants: many items of one do not delay another's."""

from penstock.core.turns import Turns


def taken(turns: Turns[str]) -> list[str]:
    found = []
    while (item := turns.take_first()) is not None:
        found.append(item)
    return found


def test_tenants_take_turns_however_many_items_one_of_them_has() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.add(item[0], item)
    assert taken(turns) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_tenants_items_come_by_rank_and_of_equal_ranks_in_their_order() -> None:
    turns: Turns[str] = Turns()
    for item, rank in (("x", 2.0), ("y", 1.0), ("z", 1.0)):
        turns.add("a", item, rank)
    assert turns.first() == "y"
    assert taken(turns) == ["y", "z", "x"]


def test_a_removed_item_is_not_taken_and_unknown_ones_are_ignored() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a1")
    turns.add("b", "b1")
    turns.remove("a1")
    turns.remove("a1")
    assert list(turns) == ["b1"]
    assert taken(turns) == ["b1"]
    assert turns.first() is None
