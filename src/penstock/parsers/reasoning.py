"""Reasoning before the answer, between two marks at its start.

    <think>
    The user wants ...
    </think>

    The answer is ...

Some templates write the opening mark at the prompt's end: then the answer begins inside.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.parsers.reading import Reader, Reading, expect, read_until, skip_spaces


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around reasoning."""

    open: str
    close: str
    label: str = ""
    """Text after the opening mark that is not part of the reasoning."""

    def shown_by(self, template: str) -> bool:
        """Whether a chat template has these marks; some name the closing one alone."""
        return self.close in template and (not self.label or self.open in template)

    def opened_by(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt that ends so begins with reasoning."""
        return prompt_end.rstrip().endswith(self.open + self.label)


KINDS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>", "<channel|>", "thought"),
    Marks("<|channel|>", "<|end|>", "analysis"),
)


def read(reading: Reading, marks: Marks, opened: bool, rest: Callable[[Reading], Reader[None]]) -> Reader[None]:
    """Read an answer; what follows the reasoning is read as `rest` says."""
    if not opened:
        reading.hold("")
        reading.back((yield from skip_spaces()))
        opened = yield from expect(reading, marks.open + marks.label)
        if not opened:
            reading.read_again()
    if opened:
        reading.turn()
        yield from read_until(reading.think, marks.close)
        reading.turn()
    yield from rest(reading)
