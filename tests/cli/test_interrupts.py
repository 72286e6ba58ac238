"""Ctrl-C, as a terminal sends it: an answer ends, and nothing that was done is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from penstock import LLM
from penstock.cli import main
from penstock.frontend.input_processor import ImagePrompt
from tests.support.checkpoints import SPECIAL_TOKENS, write_tiny_llama
from tests.support.terminal import Terminal

COMMAND = [sys.executable, "-m", "penstock.cli"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model that writes thousands of tokens."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("endless"), max_position_embeddings=32_768)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0  # their logits are never the greatest: a turn has no end
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return ["--model", str(folder), "--threads", "1", "--kv-cache-memory", "64MiB", "--temperature", "0"]


@contextmanager
def running(*arguments: str, **streams: Any) -> "Iterator[subprocess.Popen[bytes]]":
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    process = subprocess.Popen([*COMMAND, *arguments], start_new_session=True, **streams)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_ends_generate_with_the_text_so_far_and_code_130(endless: list[str]) -> None:
    with running("generate", "hello", *endless) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert first + rest
    assert rest.endswith(b"\n")
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_ctrl_c_in_a_batch_keeps_what_is_done_and_the_same_command_goes_on(endless: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"hello {i}\n" for i in range(2000)))
    out = tmp_path / "out.jsonl"
    arguments = ["generate", "--lines", "--file", str(prompts), "--output", str(out), "--max-num-seqs", "4"]
    arguments += [*endless, "--max-tokens", "20"]
    with running(*arguments) as process:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.read_bytes().count(b"\n") > 3):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    done = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"interrupted: {len(done)} of 2000 prompts were answered" in errors.decode()
    assert all(entry["prompt"] == f"hello {entry['index']}" for entry in done)

    some = max(entry["index"] for entry in done) + 3
    prompts.write_text("".join(f"hello {i}\n" for i in range(some)))
    with out.open("a") as file:
        file.write('{"index": 3, "prom')  # as after a crash
    again = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert f"answers {len(done)} of {some} prompts already" in again.stderr
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(entry["index"] for entry in entries) == list(range(some))
    assert entries[: len(done)] == done


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_answers_of_a_batch_are_written_as_they_end(endless: list[str], form: list[str]) -> None:
    arguments = ["generate", "--lines", *form, "--max-num-seqs", "2", *endless, "--max-tokens", "20"]
    # Unbuffered: `communicate` does not return what `readline` would have read beyond its line.
    with running(*arguments, stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n" * 2000)
        process.stdin.close()
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdin = None
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    if form:
        indices = [json.loads(line)["index"] for line in (first + rest).splitlines()]
        assert sorted(indices) == list(range(len(indices)))


@pytest.mark.parametrize(
    ("content", "words"),
    [("some text\n", "line 1 is not an answer"), ('{"index": 0, "prompt": "x", "outputs": []}\n', "another prompt")],
)
def test_a_file_of_other_answers_is_left_alone(content: str, words: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    run = subprocess.run([*COMMAND, "generate", "hi", "--output", str(out)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert words in run.stderr
    assert out.read_text() == content


def test_what_a_stopped_answer_had_written_stays_in_the_conversation(
    endless: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, make_prompt, conversations = LLM.stream, LLM.chat_prompt, []

    def stopped(self: LLM, *arguments: Any, **options: Any) -> Iterator[Any]:
        for number, delta in enumerate(stream(self, *arguments, **options)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield delta

    def recorded(self: LLM, messages: list[dict[str, str]], **template: Any) -> ImagePrompt:
        conversations.append([dict(message) for message in messages])
        return make_prompt(self, messages, **template)

    lines = iter(["hello", "more", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(LLM, "stream", stopped)
    monkeypatch.setattr(LLM, "chat_prompt", recorded)
    assert main(["chat", *endless]) == 0
    first, second = conversations
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == first[0]
    assert second[1]["content"] == capsys.readouterr().out.split("\n")[0] != ""


def test_ctrl_c_stops_a_chats_answer_keeps_what_was_written_and_the_prompt_returns(
    endless: list[str], tmp_path: Path
) -> None:
    terminal = Terminal("chat", *endless)
    terminal.wait_for("loading")
    terminal.type("/unknown\r")  # while it loads: for the first prompt
    terminal.wait_for("there is no command /unknown")
    terminal.wait_for("> ")
    terminal.type("\x1b[200~two\nlines\x1b[201~")  # as a terminal sends a paste
    terminal.wait_for("lines")
    terminal.type("\r")
    terminal.wait_for("...")  # until the first token
    terminal.read_until(300)
    terminal.type("/stats\r\x03")  # what is typed while it answers is for the next prompt
    assert "Traceback" not in terminal.wait_for("stopped")
    terminal.wait_for("conversation: 2 messages")
    terminal.wait_for("> ")
    terminal.type("\x03")
    terminal.wait_for("/exit or Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type(f"/save {tmp_path / 'kept.json'}\r")
    terminal.wait_for("saved 2 messages")
    terminal.type("/exit\r")
    assert terminal.end() == 0
    question, answer = json.loads((tmp_path / "kept.json").read_text())["messages"]
    assert question == {"role": "user", "content": "two\nlines"}
    assert answer["role"] == "assistant"
    assert answer["content"]
