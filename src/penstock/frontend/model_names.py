"""The names by which clients call a model."""

from collections.abc import Iterable

MAX_NAMES = 256
"""Maximum names of a model."""


class ModelNames:
    """The names of a model: one at least. Calls that name no model get the first in their answers."""

    def __init__(self, own: str, others: Iterable[str] = (), *, has_own: bool = True) -> None:
        """
        Args:
            own: the name that it was served by first. The server knows it by this, even after it is deleted.
            has_own: whether `own` still exists as a name.
        """
        self.own = own
        self.all = tuple(dict.fromkeys((own, *others) if has_own else others))

    def add(self, name: str) -> bool:
        """Add a name; False: there are too many."""
        if name not in self.all and len(self.all) >= MAX_NAMES:
            return False
        self.all = tuple(dict.fromkeys((*self.all, name)))
        return True

    def remove(self, name: str) -> bool:
        """Remove a name, but not the last; returns whether there was one."""
        found = name in self.all and len(self.all) > 1
        if found:
            self.all = tuple(other for other in self.all if other != name)
        return found
