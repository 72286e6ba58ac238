"""`dataclass` as in the standard library, but quick to create: 0.1 ms a class, not 0.6, and a start has 200 of them.

The standard library compiles up to six methods for each class. Here all classes share five of them, and `__init__` is
compiled when it is first needed. Not supported, as Penstock does not use them: `InitVar`, `order` and `unsafe_hash`.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any


def _dataclass(
    *, frozen: bool = False, slots: bool = False, eq: bool = True, kw_only: bool = False
) -> Callable[[type], Any]:
    """See `dataclasses.dataclass`."""

    def make(cls: type) -> Any:
        with _bases_not_frozen(cls):
            made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
            made.__dataclass_params__.frozen = frozen  # for a subclass that the standard library decorates
        methods: dict[str, Any] = {"__init__": _Init(made, frozen=frozen), "__repr__": _repr}
        if eq:
            methods |= _comparison(made, hashes=frozen)
        if frozen:
            methods |= _protection(made)
        if frozen and slots:
            methods |= {"__getstate__": _get_state, "__setstate__": _set_state}
        for name, method in methods.items():
            if name not in vars(cls):  # the class's own methods have precedence
                setattr(made, name, method)
        return made

    return make


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass


_MAKING = threading.RLock()


@contextmanager
def _bases_not_frozen(cls: Any) -> Iterator[None]:
    """Context in which no base counts as frozen: else the standard library refuses a subclass that it does not freeze
    itself, and to freeze it compiles two methods.
    """
    with _MAKING:
        params = [
            vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)
        ]
        frozen = [one for one in params if one.frozen]
        try:
            for one in frozen:
                one.frozen = False
            yield
        finally:
            for one in frozen:
                one.frozen = True


class _Init:
    """Compiles the `__init__` of a class when it is first needed; a start makes no instance of most classes."""

    def __init__(self, cls: type, *, frozen: bool) -> None:
        self._cls, self._frozen = cls, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        init = _compile_init(self._cls, frozen=self._frozen)
        self._cls.__init__ = init  # type: ignore[misc]  # this object is not asked again
        return init.__get__(instance, owner)


class _Factory:
    """The default of a parameter whose value a function makes."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _compile_init(cls: Any, *, frozen: bool) -> Any:
    scope: dict[str, Any] = {"__object_set": object.__setattr__, "__FACTORY": _FACTORY}
    listed = fields(cls)
    lines = ["__set = __object_set"] if frozen else []
    for field in listed:
        value = _value(field, scope)
        if value is not None:
            lines.append(f"__set(self, {field.name!r}, {value})" if frozen else f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    taken = [field for field in listed if field.init]
    by_name = [_parameter(field) for field in taken if field.kw_only]
    parameters = [_parameter(field) for field in taken if not field.kw_only] + ["*", *by_name] * bool(by_name)
    head, body = f" def __init__({', '.join(['self', *parameters])}):", lines or ["pass"]
    made: dict[str, Any] = {}
    # compiled in the class's module, by whose names annotations that are strings are resolved
    names = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    exec("\n  ".join([f"def __make__({', '.join(scope)}):\n{head}", *body]) + "\n return __init__", names, made)
    init = made["__make__"](**scope)
    init.__annotations__ = {field.name: field.type for field in taken} | {"return": None}
    init.__module__, init.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    return init


def _parameter(field: "Field[Any]") -> str:
    if field.default_factory is not MISSING:
        return f"{field.name}=__FACTORY"
    return field.name if field.default is MISSING else f"{field.name}=__default_{field.name}"


def _value(field: "Field[Any]", scope: dict[str, Any]) -> str | None:
    """The expression of a field's value, whose names are put into `scope`; None: the field is not set."""
    name = field.name
    if field.default_factory is not MISSING:
        scope[f"__make_{name}"] = field.default_factory
        return f"__make_{name}() if {name} is __FACTORY else {name}" if field.init else f"__make_{name}()"
    if field.default is not MISSING:
        scope[f"__default_{name}"] = field.default
        return name if field.init else f"__default_{name}"
    return name if field.init else None


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _comparison(cls: Any, *, hashes: bool) -> dict[str, Any]:
    """Equality and hash by the values of the fields."""
    compared = [field.name for field in fields(cls) if field.compare]
    values: Callable[[Any], Any]
    if len(compared) > 1:
        values = attrgetter(*compared)
    elif compared:
        only = attrgetter(*compared)
        values = lambda self: (only(self),)  # noqa: E731
    else:
        values = lambda self: ()  # noqa: E731

    def is_equal(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return {"__eq__": is_equal, "__hash__": (lambda self: hash(values(self))) if hashes else None}


def _protection(cls: Any) -> dict[str, Any]:
    """What keeps a frozen class's fields from being assigned or deleted; a subclass may have other attributes."""
    names = {field.name for field in fields(cls)}

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete_attribute(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": set_attribute, "__delattr__": delete_attribute}


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
