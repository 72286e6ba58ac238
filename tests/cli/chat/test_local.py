import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import make_parser
from penstock.cli.chat.backend import Ending, Setting, StreamItem, Usage
from penstock.cli.chat.local import LocalBackend
from penstock.errors import CheckpointError, ConfigError, InvalidRequestError
from penstock.parsers.parts import Reasoning, Text
from tests.support.script_model import HERMES, Turn, write_kind


def arguments(*flags: str) -> argparse.Namespace:
    return make_parser("chat").parse_args(["chat", *flags, "--threads", "1", "--kv-cache-memory", "8MiB"])


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    turn = Turn("It is four.", thought="Two and two.")
    return write_kind(tmp_path_factory.mktemp("scripts") / "thinking", HERMES, {"plain": (turn,)})


@pytest.fixture(scope="module")
def backend(thinking: Path) -> Iterator[LocalBackend]:
    opened = LocalBackend(arguments("--model", str(thinking), "--max-tokens", "40"))
    yield opened
    opened.close()


def answer(backend: LocalBackend, **settings: Setting) -> list[StreamItem]:
    return list(backend.stream([{"role": "user", "content": "2 + 2?"}], settings))


def joined(items: list[StreamItem], kind: type[Reasoning] | type[Text]) -> str:
    return "".join(item.text for item in items if isinstance(item, kind)).strip()


def test_reasoning_text_tokens_and_the_end_are_streamed(backend: LocalBackend) -> None:
    items = answer(backend)
    assert joined(items, Reasoning) == "Two and two."
    assert joined(items, Text) == "It is four."
    assert items[-1] == Ending("stop")
    counts = [item.num_tokens for item in items if isinstance(item, Usage)]
    assert counts == sorted(counts)
    assert counts[-1] > 3


def test_settings_precede_the_flags(backend: LocalBackend) -> None:
    assert backend.settings["max_tokens"] == 40
    assert joined(answer(backend, reasoning_effort="none"), Reasoning) == ""
    assert answer(backend, max_tokens=2)[-1] == Ending("length")


def test_another_model_replaces_the_loaded_one_which_stays_if_that_cannot_be_loaded(
    backend: LocalBackend, thinking: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        backend.select(str(tmp_path / "none"))
    assert joined(answer(backend), Text) == "It is four."
    backend.select(str(tiny_llama))
    assert backend.model == tiny_llama.name
    assert answer(backend, max_tokens=3, temperature=0.0)[-1] == Ending("length")  # some draws end it earlier
    with pytest.raises(InvalidRequestError, match="reasoning_effort has no effect on this model"):
        answer(backend, reasoning_effort="low")
    backend.select(str(thinking))
    assert joined(answer(backend), Text) == "It is four."
