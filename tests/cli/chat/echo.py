"""A backend that answers with what it was asked, and a clock that a test sets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.chat.backend import Ending, Setting, StreamItem, Usage
from penstock.cli.chat.conversation import Conversation
from penstock.cli.chat.session import Session
from penstock.errors import InvalidRequestError, PenstockError
from penstock.parsers.parts import Reasoning, Text


class Echo:
    """Thinks once, and repeats the last question word by word, with the settings' names."""

    settings: Mapping[str, Setting] = {}

    def __init__(self) -> None:
        self.model = "echo"
        self.asked: list[list[Mapping[str, Any]]] = []
        self.given: list[dict[str, Setting]] = []

    def models(self) -> list[str]:
        return ["echo", "other"]

    def select(self, model: str) -> None:
        if model not in self.models():
            raise InvalidRequestError(f"there is no model {model}", "model")
        self.model = model

    def stream(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Setting]) -> Iterator[StreamItem]:
        self.asked.append(list(messages))
        self.given.append(dict(settings))
        content = messages[-1]["content"]
        question = content if isinstance(content, str) else content[-1]["text"]
        if question == "fail":
            raise PenstockError("refused")
        yield Reasoning("Let me see.")
        for number, word in enumerate(question.split(" "), 1):
            yield Usage(10, number)
            yield Text(f"{word} ")
        yield Ending("stop")

    def close(self) -> None:
        pass


def new_session(system: str = "") -> Session:
    times = iter(range(10**6))
    return Session(Echo(), Conversation(system), clock=lambda: float(next(times)))


def ask(session: Session, text: str) -> str:
    question, answer = session.question(text), session.begin()
    for _ in session.stream(question, answer):
        pass
    session.finish(question, answer)
    return answer.text
