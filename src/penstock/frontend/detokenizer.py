"""Tokens to text as they come, and the strings that end it.

    token ids ──Detokenizer──> text of whole characters ──StopStrings──> text that no stop string can claim

Both keep a state of bounded size and look at each token and each character once: a token costs the same however long
the text is.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from penstock.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence, special tokens left out but those of `shown`, never a part of a character.

    The pieces put together are what `decode` makes of prompt and answer, less what it makes of the prompt; bytes that
    are no UTF-8 become U+FFFD.

    Tokens of two kinds take turns. Those that stand for bytes (all of a byte-level BPE; the byte fallback of others) go
    through an incremental UTF-8 decoder. The text of the rest may depend on the token before: whether it begins with a
    space, say. It is what the token adds to the text of that one.

    `tokenizers.decoders.DecodeStream` does not do: while bytes are no UTF-8 its cost grows with each token, and it
    raises where a byte fallback goes wrong after a whole character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        shown: Sequence[int] = (),
        *,
        keeps_first_space: bool = False,
    ) -> None:
        """
        Args:
            keeps_first_space: some tokenizers' `decode` takes a space away where no text is before it. An answer that
                must have a form is shown with it: the form counts each character that its tokens stand for.
        """
        self._tokenizer = tokenizer
        self._shown = shown
        self._keeps_first_space = keeps_first_space
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        visible = (token for token in reversed(prompt_token_ids) if tokenizer.is_shown(token))
        self._before = next(visible, None)  # the answer goes on from it

    def add_token(self, token_id: int) -> str:
        """The text that is complete with this token; it may be empty."""
        if not self._tokenizer.is_shown(token_id):
            return self.flush() + self._tokenizer.token_text(token_id) if token_id in self._shown else ""
        raw = self._tokenizer.raw_bytes(token_id)
        text = self.flush() + self._added_text(token_id) if raw is None else self._characters.decode(raw)
        self._before = token_id
        return text

    def flush(self) -> str:
        """At the end: U+FFFD if a character is incomplete."""
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        return text

    def _added_text(self, token_id: int) -> str:
        if self._before is None:
            return (
                self._tokenizer.token_text(token_id) if self._keeps_first_space else self._tokenizer.decode([token_id])
            )
        before = self._tokenizer.decode([self._before])
        return self._tokenizer.decode([self._before, token_id])[len(before) :]


class Released(NamedTuple):
    """Text that may be shown, and the stop string that ends it, if one does."""

    text: str
    stop: str | None


class StopStrings:
    """Watches a text for strings that end it, whatever pieces it comes in.

    Of several, the one that is complete first ends the text; of those complete at the same character, the longest. The
    text is cut before it. Text that might be the beginning of one is held back until that is decided.

    The search is that of Knuth, Morris and Pratt (1977), all strings side by side.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(text, _fallbacks(text)) for text in sorted(strings, key=len, reverse=True)]
        self._first = frozenset(text[0] for text in strings)
        self._matched = [0] * len(self._strings)  # how many characters of each the text so far ends with
        self._held = ""

    def add_text(self, text: str, may_stop: bool = True) -> Released:
        """Take the next piece of text; with `may_stop` False, a string complete in it is text like any other."""
        if not self._held and self._first.isdisjoint(text):
            return Released(text, None)
        seen = self._held + text
        for place in range(len(self._held), len(seen)):
            stop = self._match(seen[place])
            if stop is not None and may_stop:
                self._held = ""
                return Released(seen[: place + 1 - len(stop)], stop)
        keep = len(seen) - max(self._matched)
        self._held = seen[keep:]
        return Released(seen[:keep], None)

    def flush(self) -> str:
        """At the end: the text held back."""
        text, self._held = self._held, ""
        return text

    def _match(self, character: str) -> str | None:
        """Go on by a character: the longest string that it completes, or None."""
        complete = None
        for i, (text, fallbacks) in enumerate(self._strings):
            count = self._matched[i]
            while count and text[count] != character:
                count = fallbacks[count]
            count += text[count] == character
            if count == len(text):
                complete = complete or text
                count = fallbacks[count]
            self._matched[i] = count
        return complete


def _fallbacks(text: str) -> list[int]:
    """For each n: how long the longest beginning of `text` is that its first n characters end with, n itself aside."""
    fallbacks = [0, 0]
    for character in text[1:]:
        count = fallbacks[-1]
        while count and text[count] != character:
            count = fallbacks[count]
        fallbacks.append(count + (text[count] == character))
    return fallbacks
