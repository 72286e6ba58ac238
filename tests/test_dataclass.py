"""`dataclass` behaves as the standard library's."""

import copy
import dataclasses
import inspect
import pickle
import typing
from dataclasses import FrozenInstanceError, field, replace
from typing import Any

import pytest

from penstock import SamplingParams
from penstock.dataclass import dataclass as quick


def _classes(dataclass: Any) -> list[type]:
    """Classes of each kind that Penstock has."""

    @dataclass(frozen=True, slots=True)
    class Point:
        """A point."""

        x: int
        y: float = 0.5
        tags: list[str] = field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "y", self.y * 2)

    @dataclass(frozen=True, slots=True)
    class Named(Point):
        """A point with a name."""

        name: str = "p"
        note: str = field(default="n", init=False, repr=False)

    @dataclass(slots=True)
    class Count:
        """A count."""

        x: int
        seen: dict[str, int] = field(default_factory=dict, init=False)

    @dataclass(slots=True, eq=False, kw_only=True)
    class Entry:
        """An entry."""

        x: int = 1
        y: int

        def __repr__(self) -> str:
            return "entry"

    @dataclass(frozen=True)
    class Nothing:
        """No field."""

    return [Point, Named, Count, Entry, Nothing]


QUICK, STANDARD = _classes(quick), _classes(dataclasses.dataclass)
GIVEN: list[dict[str, Any]] = [{"x": 3}, {"x": 3, "y": 1.5, "name": "q"}, {"x": 7}, {"y": 2}, {}]


@pytest.mark.parametrize("number", range(len(GIVEN)))
def test_instances_look_compare_and_copy_as_those_of_the_standard_library(number: int) -> None:
    made, expected = QUICK[number](**GIVEN[number]), STANDARD[number](**GIVEN[number])
    again, expected_again = QUICK[number](**GIVEN[number]), STANDARD[number](**GIVEN[number])
    assert repr(made) == repr(expected)
    assert (made == again) is (expected == expected_again)
    assert made != expected
    assert (type(made).__hash__ is None) is (type(expected).__hash__ is None)
    if type(made).__hash__ is not None and made == again:
        assert hash(made) == hash(expected)
    assert repr(copy.deepcopy(made)) == repr(made)
    assert dataclasses.asdict(made) == dataclasses.asdict(expected)  # type: ignore[call-overload]
    assert str(inspect.signature(QUICK[number])) == str(inspect.signature(STANDARD[number]))
    assert typing.get_type_hints(QUICK[number].__init__) == typing.get_type_hints(STANDARD[number].__init__)


def test_annotations_that_are_strings_are_resolved_in_the_classs_module() -> None:
    def make(dataclass: Any) -> Any:
        @dataclass(frozen=True, slots=True)
        class Tree:
            """With a type that is a name."""

            stored: "Stored"
            more: "list[Stored] | None" = None

        return Tree

    made, expected = make(quick), make(dataclasses.dataclass)
    assert typing.get_type_hints(made.__init__) == typing.get_type_hints(expected.__init__)
    assert typing.get_type_hints(made.__init__)["stored"] is Stored
    signatures = [inspect.signature(cls, eval_str=True) for cls in (made, expected)]
    assert str(signatures[0]) == str(signatures[1])
    assert made.__init__.__globals__ is expected.__init__.__globals__
    names = globals().keys()
    assert not {"__init__", "__make__"} & names, "nothing of the class's making is left in its module"


def test_a_class_of_no_module_is_made() -> None:
    cls: Any = quick(frozen=True)(type("Alone", (), {"__annotations__": {"x": int}, "__module__": "nowhere"}))
    assert cls(3).x == 3


def test_a_frozen_class_cannot_be_changed_and_its_copies_can() -> None:
    point: Any = QUICK[0](x=3)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 4
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    assert replace(point, x=4) == QUICK[0](x=4, y=1.0)
    assert point.tags is not QUICK[0](x=3).tags


@quick(frozen=True, slots=True)
class Stored:
    """What pickle finds by its name."""

    x: int
    y: tuple[int, ...] = ()


def test_a_frozen_class_with_slots_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Stored(1, (2,)))) == Stored(1, (2,))
    assert not hasattr(Stored(1), "__dict__")


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"Stored.__init__\(\) missing 1 required positional argument: 'x'"):
        Stored()  # type: ignore[call-arg]


def test_a_subclass_of_a_frozen_class_has_attributes_of_its_own() -> None:
    class Measured(QUICK[4]):  # type: ignore[misc, name-defined]
        """With an attribute that is no field."""

    measured = Measured()
    measured.seconds = 2.0
    assert measured.seconds == 2.0


def test_a_users_subclass_is_made_by_the_standard_library() -> None:
    @dataclasses.dataclass(frozen=True)
    class Labelled(SamplingParams):
        """With a field of the user's."""

        label: str = ""

    assert replace(Labelled(temperature=0.5, label="a"), top_k=3) == Labelled(temperature=0.5, top_k=3, label="a")
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Loose", (SamplingParams,), {}))
