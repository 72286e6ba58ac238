import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.chat.markdown import AnswerView, blocks, visible

ANSWER = """# Tables

| a | b |
|---|---|
| 1 | 2 |

```python
def f():

    return 1
```

- one
- two

<b>not bold</b>, [a link](http://x.y/)
next line
"""


def shown(text: str, reasoning: str = "", *, size: int = 4, is_terminal: bool = False) -> str:
    """What is on the screen, or what was written to it, after an answer in small pieces."""
    console = Console(file=io.StringIO(), width=60, height=10, force_terminal=is_terminal, color_system=None)
    times = iter(range(10**9))
    with AnswerView(console, clock=lambda: float(next(times))) as view:
        for start in range(0, len(reasoning), size):
            view.add_reasoning(reasoning[start : start + size])
        for start in range(0, len(text), size):
            view.add_text(text[start : start + size])
    assert isinstance(console.file, io.StringIO)
    written = re.sub(r"\x1b\[\??[0-9;]*[A-Za-z]", "", console.file.getvalue())  # rich's own movements
    return "\n".join(line.rstrip() for line in written.splitlines())


def test_an_answer_is_drawn_as_markdown_once_however_it_was_cut() -> None:
    drawn = shown(ANSWER, size=4)
    assert drawn == shown(ANSWER, size=1) == shown(ANSWER, size=10**4)
    assert drawn.splitlines() == [
        "Tables",
        "",
        " a  b",
        " ────",
        " 1  2",
        "",
        " def f():",
        "",
        "     return 1",
        "",
        " • one",
        " • two",
        "",
        "<b>not bold</b>, a link (http://x.y/)",
        "next line",
    ]


@given(st.lists(st.sampled_from(["a", "\n", "\n\n", "- ", "```\n", "| a |", "|---|", "# ", "    ", "[x]: y", "1. "])))
def test_blocks_are_the_text_in_order(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(blocks(text)) == text


def test_reasoning_is_shown_while_it_comes_and_folded_after_its_end() -> None:
    drawn = shown("Yes.", "Is it? It is.", is_terminal=True)
    assert "Is i" in drawn
    assert drawn.endswith("Yes.")
    kept = shown("Yes.", "Is it? It is.").splitlines()
    assert kept[0].startswith("▸ thought for ")
    assert kept[1:] == ["", "Yes."]


def test_a_block_longer_than_the_screen_is_printed_whole_at_its_end() -> None:
    lines = [f"line {number}" for number in range(50)]
    assert shown("\n".join(lines), is_terminal=True).splitlines()[-50:] == lines


@pytest.mark.parametrize("control", ["\x1b[2J", "\x07", "\x9b31m", "\r", "\x7f"])
def test_control_characters_of_an_answer_do_not_reach_the_terminal(control: str) -> None:
    assert control[0] not in shown(f"before {control} after")
    assert visible("a\tb\r\nc") == "a\tb\nc"
