"""Markdown drawn while it streams.

Complete blocks are printed once and scroll away as any output; only the last, unfinished one is drawn again.
"""

import itertools
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segments
from rich.text import Text as Styled

MIN_INTERVAL = 0.05
"""Least seconds between two drawings."""
MAX_SHARE = 0.2
"""Greatest share of the time that drawing takes: the model may run on the same processor."""
REASONING_LINES = 8
"""Maximum lines of reasoning on the screen."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")
"""Blocks are drawn one by one, so a link cannot refer to another block: such references are shown as text."""


def visible(text: str) -> str:
    """The text with control characters as symbols, so that an answer cannot command the terminal."""
    return _CONTROLS.sub(lambda found: _symbol(ord(found[0])), text.replace("\r\n", "\n"))


def _symbol(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def blocks(text: str) -> list[str]:
    """Markdown cut before each block but the first: paragraphs, lists, tables, code. Only the last can still grow."""
    lines = text.splitlines(keepends=True)
    complete = "".join(line for line in lines if line.endswith("\n"))  # what an unfinished line begins is not known yet
    tokens = [token for token in _PARSER.parse(complete) if token.level == 0 and token.nesting >= 0 and token.map]
    starts = [0, *(token.map[0] for token in tokens[1:] if token.map), len(lines)]
    return ["".join(lines[start:end]) for start, end in itertools.pairwise(starts)]


class _Heading(Heading):
    """A heading at the left margin, as in the text that the model wrote."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    """Markdown that keeps line breaks, shows HTML as text, and links with their address."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for child in (child for token in self.parsed for child in token.children or ()):
            if child.type == "softbreak":
                child.type = "hardbreak"  # models end lines of verses and addresses with a single line break


class _Lines:
    """The lines of a renderable, without empty ones at its ends; of many, the last."""

    def __init__(self, shown: RenderableType, max_lines: int | None = None) -> None:
        self._shown = shown
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options, pad=False, new_lines=True)
        filled = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        if filled:
            shown = lines[filled[0] : filled[-1] + 1]
            for line in shown if self._max_lines is None else shown[-self._max_lines :]:
                yield Segments(line)


class AnswerView:
    """Draws one answer on the terminal: reasoning folded after its end, then the text as Markdown."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(Styled("..."), console=console, auto_refresh=False, transient=True, redirect_stderr=False)
        self._began = clock()
        self._next_drawing = 0.0
        self._reasoning = self._text = ""
        self._is_folded = self._has_printed = False

    def __enter__(self) -> "AnswerView":
        self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        """Print the rest of the answer, also after Ctrl-C."""
        self._live.stop()
        self._fold()
        self._print_blocks(blocks(self._text))

    def add_reasoning(self, text: str) -> None:
        self._reasoning += visible(text)
        self._draw(lambda: _Lines(Styled(self._reasoning, style="dim italic"), REASONING_LINES))

    def add_text(self, text: str) -> None:
        self._text += visible(text)
        if self._text.strip():
            self._fold()
            self._draw(self._drawn_text)

    def _drawn_text(self) -> RenderableType:
        *finished, self._text = blocks(self._text)
        self._print_blocks(finished)
        last = _Lines(_Markdown(self._text), max(1, self._console.height - 2))
        return Group("", last) if self._has_printed else last

    def _draw(self, shown: Callable[[], RenderableType]) -> None:
        """Draw, unless the last drawing was a moment ago."""
        now = self._clock()
        if now < self._next_drawing:
            return
        self._live.update(shown(), refresh=True)
        done = self._clock()
        self._next_drawing = done + max(MIN_INTERVAL, (done - now) / MAX_SHARE)

    def _fold(self) -> None:
        """Replace the reasoning by one line."""
        if not self._reasoning.strip() or self._is_folded:
            return
        self._is_folded = self._has_printed = True
        if self._live.is_started:
            self._live.update("", refresh=True)
        seconds = self._clock() - self._began
        self._console.print(f"▸ thought for {seconds:.1f} s (/reasoning shows it)", style="dim italic", highlight=False)
        self._next_drawing = 0.0

    def _print_blocks(self, texts: list[str]) -> None:
        shown = [text for text in texts if text.strip()]
        if shown and self._live.is_started:
            self._live.update("", refresh=True)
        for text in shown:
            if self._has_printed:
                self._console.print()
            self._console.print(_Lines(_Markdown(text)), end="")
            self._has_printed = True
