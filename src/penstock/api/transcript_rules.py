"""Rules for the tokens of a transcript, as plain data."""

from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class TranscriptRules:
    """Rules that Whisper's answers follow (Radford et al., 2022, arXiv:2212.04356, section 2.3).

    Timestamps come in pairs, the end of a segment and the begin of the next, never go back, and are chosen where they
    are together more likely than any other token.

    Raises:
        InvalidRequestError: a token is no id; `param` is "transcript".
    """

    first_timestamp: int
    """Token of 0 seconds; all above it are timestamps, and the one below it says that there are none."""
    end: int
    """Token that ends the answer; those below it are text."""
    begin_suppress: tuple[int, ...] = ()
    """Tokens that must not begin the answer."""
    has_timestamps: bool = True
    """False: only `begin_suppress` applies."""
    max_initial: int | None = None
    """Highest first timestamp, in steps; None: any."""

    def __post_init__(self) -> None:
        for token in self.tokens:
            if type(token) is not int or token < 0:
                raise InvalidRequestError(f"transcript: tokens are ids from 0, not {token!r}", "transcript")

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that the rules name."""
        return (self.first_timestamp, self.end, *self.begin_suppress)
