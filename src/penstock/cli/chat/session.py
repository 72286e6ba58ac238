"""A chat's state: the backend, the conversation, the settings, and the tokens and times of its answers."""

import time
from collections.abc import Callable, Generator
from dataclasses import field

from penstock.cli.chat.backend import Backend, Ending, Setting, Usage
from penstock.cli.chat.conversation import Conversation, Message
from penstock.dataclass import dataclass
from penstock.parsers.parts import Reasoning, Text


@dataclass(frozen=True, slots=True)
class Question:
    """A message to answer, after a conversation."""

    message: Message
    before: Conversation


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come, and its times on the session's clock."""

    began: float
    first: float | None = None
    ended: float | None = None
    text: str = ""
    reasoning: str = ""
    usage: Usage | None = None
    ending: Ending | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or self.began) - self.began

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token; None if it is unknown."""
        if self.usage is None or self.usage.num_tokens < 2 or self.first is None or self.ended is None:
            return None
        return (self.usage.num_tokens - 1) / (self.ended - self.first) if self.ended > self.first else None

    def summary(self) -> str:
        """Tokens, speed and times in one line."""
        parts = []
        if self.usage is not None:
            parts.append(_tokens(self.usage.num_tokens))
        if (speed := self.tokens_per_second) is not None:
            parts.append(f"{speed:.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first token after {self.first - self.began:.2f} s")
        parts.append(f"{self.seconds:.1f} s in all")
        if self.usage is not None and self.usage.num_prompt_tokens is not None:
            cached = self.usage.num_cached_tokens
            parts.append(
                f"prompt of {_tokens(self.usage.num_prompt_tokens)}" + (f", {cached} cached" if cached else "")
            )
        if self.ending is None:
            parts.append("stopped")
        elif self.ending.reason == "length":
            parts.append("cut at the limit of tokens")
        return " · ".join(parts)


@dataclass(slots=True)
class Totals:
    """Sums over a session's answers."""

    num_answers: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer) -> None:
        self.num_answers += 1
        self.seconds += answer.seconds
        if answer.usage is not None:
            self.num_tokens += answer.usage.num_tokens
            self.num_prompt_tokens += answer.usage.num_prompt_tokens or 0


@dataclass(slots=True)
class Session:
    """One chat."""

    backend: Backend
    conversation: Conversation
    settings: dict[str, Setting] = field(default_factory=dict)
    """Settings of `/set`, which precede those of the backend."""
    images: tuple[str, ...] = ()
    """Data URLs of images for the next message."""
    totals: Totals = field(default_factory=Totals)
    last: Answer | None = None
    clock: Callable[[], float] = time.monotonic

    def question(self, text: str) -> Question:
        """The next message, with the images attached to it."""
        images, self.images = self.images, ()
        return Question(Message("user", text, images=images), self.conversation)

    def begin(self) -> Answer:
        return Answer(self.clock())

    def stream(self, question: Question, answer: Answer) -> Generator[Reasoning | Text, None, None]:
        """Stream an answer into `answer`; yields its reasoning and text. `finish` must follow.

        Raises:
            PenstockError: as `Backend.stream`.
        """
        for item in self.backend.stream(question.before.prompt(question.message), self.settings):
            now = self.clock()
            answer.first = now if answer.first is None else answer.first
            if isinstance(item, Usage):
                answer.usage = item
            elif isinstance(item, Ending):
                answer.ending = item
            elif isinstance(item, Reasoning):
                answer.reasoning += item.text
                yield item
            else:
                answer.text += item.text
                yield item

    def finish(self, question: Question, answer: Answer) -> bool:
        """Add the turn to the conversation, and count it; False if there is no answer to add.

        A stopped answer is added as far as it came. Without a text it is not, and the conversation stays as it was.
        """
        answer.ended = self.clock()
        if answer.ending is None and not answer.text:
            return False
        self.conversation = question.before.with_turn(question.message, answer.text, answer.reasoning)
        self.totals.add(answer)
        self.last = answer
        return True


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s")
