"""Reasoning between two tags at the beginning of an answer.

    <think>
    The user wants ...
    </think>

    The answer is ...

If the prompt ends with the opening tag, the answer begins inside the reasoning.
"""

from collections.abc import Callable

from penstock.dataclass import dataclass
from penstock.parsers.reading import Reader, Reading, expect, read_until, skip_spaces


@dataclass(frozen=True, slots=True)
class Marks:
    """The tags around reasoning."""

    open: str
    close: str
    label: str = ""
    """Text after the opening tag that is not part of the reasoning."""

    def shown_by(self, template: str) -> bool:
        """Whether a chat template has these tags; some have only the closing one."""
        return self.close in template and (not self.label or self.open in template)

    def opened_by(self, prompt_end: str) -> bool:
        """Whether the answer to a prompt with this end begins inside reasoning."""
        return prompt_end.rstrip().endswith(self.open + self.label)


KINDS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>", "<channel|>", "thought"),
    Marks("<|channel|>", "<|end|>", "analysis"),
)


def read(reading: Reading, marks: Marks, opened: bool, rest: Callable[[Reading], Reader[None]]) -> Reader[None]:
    """Parse an answer; `rest` parses the text after the reasoning."""
    if not opened:
        reading.buffer("")
        reading.push_back((yield from skip_spaces()))
        opened = yield from expect(reading, marks.open + marks.label)
        if not opened:
            reading.read_again()
    if opened:
        reading.turn()
        yield from read_until(reading.emit_reasoning, marks.close)
        reading.turn()
    yield from rest(reading)
