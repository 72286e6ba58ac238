import json
from pathlib import Path

import pytest

from penstock.cli.chat.commands import COMMANDS, completions, is_command, run_command
from penstock.cli.chat.session import Session
from penstock.errors import InvalidRequestError
from tests.cli.chat.echo import ask, new_session


def contents(session: Session) -> list[str]:
    return [message.content.strip() for message in session.conversation.messages]


def asked(session: Session) -> list[tuple[str, str]]:
    """The messages of the last request."""
    return [(message["role"], message["content"].strip()) for message in session.backend.asked[-1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, True) for text in ("/help", "/set top_k 3", "/hlep", "/", "/?")),
        *((text, False) for text in ("/etc/hosts is what?", " /help", "a /help", "1/2")),
    ],
)
def test_a_word_after_a_slash_is_a_command_and_a_path_is_a_message(text: str, expected: bool) -> None:
    assert is_command(text) is expected


def test_a_mistyped_command_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidRequestError, match="there is no command /regenrate: did you mean /regenerate"):
        run_command(new_session(), "/regenrate")
    with pytest.raises(InvalidRequestError, match="/save needs an argument: /save FILE"):
        run_command(new_session(), "/save")
    with pytest.raises(InvalidRequestError, match="/undo takes no argument"):
        run_command(new_session(), "/undo two")


def test_undo_regenerate_and_reset_change_what_is_sent_next() -> None:
    session = new_session("Be brief.")
    ask(session, "one")
    ask(session, "two")
    assert asked(session) == [("system", "Be brief."), ("user", "one"), ("assistant", "one"), ("user", "two")]
    question = run_command(session, "/regenerate").question
    assert question is not None
    assert question.message.content == "two"
    assert contents(session) == ["one", "one", "two", "two"], "the old answer stays until there is a new one"
    session.finish(question, answer := session.begin())
    assert not answer.text
    assert contents(session) == ["one", "one", "two", "two"]
    run_command(session, "/undo")
    assert contents(session) == ["one", "one"]
    run_command(session, "/reset")
    ask(session, "three")
    assert asked(session) == [("system", "Be brief."), ("user", "three")]
    run_command(session, "/system none")
    run_command(session, "/clear")
    with pytest.raises(InvalidRequestError, match="no question yet"):
        run_command(session, "/undo")


def test_settings_are_checked_when_they_are_set_and_sent_with_each_question() -> None:
    session = new_session()
    assert run_command(session, "/set temperature 0.5").text == "temperature is 0.5"
    run_command(session, "/set --top-k 20")
    run_command(session, "/set presence_penalty -1")
    run_command(session, "/set presence_penalty default")
    run_command(session, "/set reasoning_effort low")
    ask(session, "hello")
    assert session.backend.given == [{"temperature": 0.5, "top_k": 20, "reasoning_effort": "low"}]
    run_command(session, "/set top_k default")
    assert "top_k default" in run_command(session, "/set").text
    for command, words in {
        "/set temprature 1": "did you mean temperature",
        "/set top_p 2": "top_p must be",
        "/set top_k many": "must be an integer",
        "/set seed": "needs a value",
        "/set reasoning_effort lots": "must be one of none",
    }.items():
        with pytest.raises(InvalidRequestError, match=words):
            run_command(session, command)
    assert session.settings == {"temperature": 0.5, "reasoning_effort": "low"}


def test_a_saved_conversation_is_an_openai_request_and_loads_as_it_was(tmp_path: Path) -> None:
    session, file = new_session("Be brief."), tmp_path / "chat.json"
    ask(session, "grüße\nan alle")
    before = session.conversation
    assert run_command(session, f"/save {file}").text.startswith("saved 3 messages")
    assert [message["role"] for message in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]
    run_command(session, "/reset")
    run_command(session, f"/load {file}")
    assert session.conversation == before
    assert run_command(session, "/reasoning").text == "Let me see."


def test_an_image_goes_with_the_next_message_and_stays_with_it(tmp_path: Path) -> None:
    session, file, saved = new_session(), tmp_path / "red.png", tmp_path / "chat.json"
    file.write_bytes(b"red")
    url = "data:image/png;base64,cmVk"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    run_command(session, f"/image {file}")
    ask(session, "what?")
    ask(session, "more")
    assert [one["content"] for one in session.backend.asked[-1]] == [parts, "what? ", "more"]
    run_command(session, f"/save {saved}")
    run_command(session, "/reset")
    run_command(session, f"/load {saved}")
    run_command(session, "/undo")
    question = run_command(session, "/regenerate").question
    assert question is not None
    assert question.message.parts == parts
    for argument, words in (("none.png", "cannot be read"), (str(saved), "is no image")):
        with pytest.raises(InvalidRequestError, match=words):
            run_command(session, f"/image {argument}")
    run_command(session, f"/image {file}")
    assert run_command(session, "/image").text.endswith(" 1")
    run_command(session, "/image none")
    assert session.images == ()


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '[{"role": "tool", "content": "x"}]', '[{"role": "user"}]', "[" * 10**5]
)
def test_a_file_without_a_conversation_is_refused_and_the_conversation_stays(content: str, tmp_path: Path) -> None:
    session, file = new_session(), tmp_path / "chat.json"
    ask(session, "hello")
    file.write_text(content)
    with pytest.raises(InvalidRequestError):
        run_command(session, f"/load {file}")
    assert contents(session) == ["hello", "hello"]


def test_models_are_listed_and_chosen() -> None:
    session = new_session()
    assert run_command(session, "/model").text == "* echo\n  other"
    run_command(session, "/model other")
    assert run_command(session, "/model").text == "  echo\n* other"
    with pytest.raises(InvalidRequestError, match="there is no model third"):
        run_command(session, "/model third")


def test_stats_have_the_speed_after_the_first_token() -> None:
    session = new_session()
    ask(session, "a b c")  # the clock: begun at 0, the reasoning at 1, a token every two, ended at 9
    assert "answers: 1, with 3 tokens in 9.0 s; their prompts: 10 tokens" in run_command(session, "/stats").text
    assert session.last is not None
    assert session.last.summary() == (
        "3 tokens · 0.2 tokens/s · first token after 1.00 s · 9.0 s in all · prompt of 10 tokens"
    )


def test_help_lists_every_command_and_exit_ends() -> None:
    text = run_command(new_session(), "/?").text
    assert [line.split()[0] for line in text.splitlines()] == [f"/{name}" for name in COMMANDS]
    assert run_command(new_session(), "/bye").ends


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/re", (3, ["/reset", "/regenerate", "/reasoning"])),
        ("/set temp", (4, ["temperature "])),
        ("/set reasoning_effort m", (1, ["minimal", "medium", "max"])),
        ("/set top_k d", (1, ["default"])),
        ("/model o", (1, ["other"])),
        ("/stats x", (1, [])),
    ],
)
def test_commands_settings_and_models_are_completed(text: str, expected: tuple[int, list[str]]) -> None:
    assert completions(new_session(), text) == expected
