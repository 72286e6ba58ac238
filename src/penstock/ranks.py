"""How a model is divided among the ranks of an engine: processes, each with its own rows of the weights.

The outputs of a map are divided, never its sums: each element is computed by one rank, as if there were no other, so
that an answer is the same, bit for bit, for any number of ranks. Then the ranks exchange what they have
(`kernels.ranks`).
"""

from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of an engine's."""

    rank: int = 0
    size: int = 1

    def own(self, total: int) -> range:
        """Which of so many things are this rank's: neighbours, as many as other ranks have, or one more or less."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)


ALONE = Ranks()


def check_divides(size: int, total: int) -> None:
    """Refuse a number of ranks among which a model's heads cannot be divided.

    Args:
        total: what a number of ranks must divide; 0: any will do.

    Raises:
        ConfigError: it does not; the message names those that do.
    """
    if size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, not {size}")
    if total % size:
        fitting = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model: every rank must have as many heads of keys, or "
            f"channels of recurrent layers, as the others; {fitting} would"
        )
