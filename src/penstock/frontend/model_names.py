"""The names by which clients call a model."""

from collections.abc import Iterable

MAX_NAMES = 256
"""Maximum names of a model."""


class ModelNames:
    """A model's own name, which answers to calls that name none have, and others."""

    def __init__(self, own: str, others: Iterable[str] = ()) -> None:
        self.all = tuple(dict.fromkeys((own, *others)))

    @property
    def own(self) -> str:
        """The first name."""
        return self.all[0]

    def add(self, name: str) -> bool:
        """Add a name; False: there are too many."""
        if name not in self.all and len(self.all) >= MAX_NAMES:
            return False
        self.all = tuple(dict.fromkeys((*self.all, name)))
        return True

    def remove(self, name: str) -> bool:
        """Remove a name that was added; returns whether there was one."""
        found = name in self.all[1:]
        self.all = (self.own, *(other for other in self.all[1:] if other != name))
        return found
