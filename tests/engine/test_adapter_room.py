"""Which adapters are in memory, by a runner that loads when it is told to."""

import threading
from collections.abc import Callable

import pytest

from penstock.api.request import Adapter
from penstock.engine.adapters import AdapterRoom
from penstock.errors import AdapterError


class Runner:
    """Loads at once, unless it is held."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.failing: set[str] = set()
        self.free = threading.Event()
        self.free.set()

    def load_adapter(self, adapter: Adapter) -> None:
        self.free.wait(10)
        if adapter.name in self.failing:
            raise AdapterError("it is damaged")
        self.loaded.append(adapter.name)

    def drop_adapter(self, adapter: Adapter) -> None:
        self.loaded.remove(adapter.name)


def adapter(name: str, size: int = 10) -> Adapter:
    return Adapter(name, f"/{name}", f"digest of {name}", size)


def using(*names: str) -> Callable[[], set[str]]:
    return lambda: {adapter(name).digest for name in names}


def load(room: AdapterRoom, name: str, *used: str) -> None:
    future = room.need(adapter(name))
    room.make_room(using(*used))
    if future is not None:
        future.result(10)
    assert room.need(adapter(name)) is None


def test_an_adapter_is_loaded_once_and_then_there() -> None:
    runner = Runner()
    room = AdapterRoom(runner, 30)
    first, second = room.need(adapter("a")), room.need(adapter("a"))
    assert first is second is not None
    room.make_room(using())
    first.result(10)
    assert room.need(adapter("a")) is None
    assert runner.loaded == ["a"]


def test_the_one_that_was_not_needed_for_longest_gives_way() -> None:
    runner = Runner()
    room = AdapterRoom(runner, 30)
    for name in ("a", "b", "c", "a", "d"):
        load(room, name)
    assert runner.loaded == ["a", "c", "d"]
    load(room, "b", "c", "d")  # used ones stay where others can go
    assert runner.loaded == ["c", "d", "b"]


def test_one_in_use_is_waited_for_and_takes_no_more_requests_meanwhile() -> None:
    runner = Runner()
    room = AdapterRoom(runner, 10)
    load(room, "a")
    wanted = room.need(adapter("b"))
    assert wanted is not None
    room.make_room(using("a"))
    again = room.need(adapter("a"))
    assert again is not None, "it is to leave: new requests wait for their turn"
    assert room.waiting == [wanted, again]
    room.make_room(using("a"))
    assert not wanted.done()
    room.make_room(using())
    wanted.result(10)
    assert runner.loaded == ["b"]
    room.make_room(using("b"))
    assert not again.done()
    room.make_room(using())
    again.result(10)
    assert runner.loaded == ["a"]


def test_one_that_is_being_loaded_for_a_request_does_not_give_way_before_it() -> None:
    runner = Runner()
    room = AdapterRoom(runner, 10)
    first, second = room.need(adapter("a")), room.need(adapter("b"))
    assert first is not None
    assert second is not None
    room.make_room(using())
    first.result(10)
    room.make_room(using("a"))
    assert runner.loaded == ["a"]
    assert not second.done()


def test_loading_holds_up_nobody_else() -> None:
    runner = Runner()
    runner.free.clear()
    room = AdapterRoom(runner, 30)
    future = room.need(adapter("a"))
    room.make_room(using())
    assert future is not None
    assert not future.done()
    runner.free.set()
    future.result(10)


def test_one_that_cannot_be_loaded_fails_alone_and_may_be_tried_again() -> None:
    runner = Runner()
    runner.failing.add("a")
    room = AdapterRoom(runner, 30)
    future = room.need(adapter("a"))
    room.make_room(using())
    assert future is not None
    with pytest.raises(AdapterError, match="damaged"):
        future.result(10)
    runner.failing.clear()
    load(room, "a")
    assert room.num_loaded == 1


def test_one_that_never_fits_is_refused() -> None:
    future = AdapterRoom(Runner(), 30).need(adapter("a", 31))
    assert future is not None
    with pytest.raises(AdapterError, match="31 weights, and there is memory for 30"):
        future.result(0)


def test_there_are_no_more_than_there_are_slots() -> None:
    runner = Runner()
    room = AdapterRoom(runner, 1000, max_adapters=2)
    for name in ("a", "b", "c"):
        load(room, name)
    assert runner.loaded == ["b", "c"]
