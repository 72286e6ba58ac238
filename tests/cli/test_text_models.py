"""`generate` and `chat` refuse models that they cannot use before the weights are read, and say what to do instead."""

import json
import shutil
from pathlib import Path

import pytest

from penstock.cli import main
from tests.support.checkpoints import write_tiny_llama
from tests.support.gguf_files import write_gguf

FLAGS = ["--kv-cache-memory", "8MiB", "--threads", "1"]


def without_weights(folder: Path) -> Path:
    """A folder whose weights would be refused if they were read."""
    write_tiny_llama(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, *FLAGS]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("forms", "words"),
    [
        (["vocab.json"], "has no tokenizer.json, but vocab.json, which cannot be read alone (transformers"),
        (["vocab.json", "vocab.txt"], "but vocab.json, vocab.txt, which"),
        ([], "has no tokenizer.json; without it the model takes token ids only"),
    ],
)
def test_a_model_without_tokenizer_json_is_refused_by_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, forms: list[str], words: str
) -> None:
    folder = without_weights(tmp_path)
    (folder / "tokenizer.json").unlink()
    for name in forms:
        (folder / name).touch()
    said = refusal(capsys, command, *(["hello"] if command == "generate" else []), "--model", str(folder))
    assert words in said
    assert "LLM.generate in Python, or at /v1/completions" in said


def test_a_gguf_file_without_a_tokenizer_is_refused(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    write_gguf(tmp_path / "bare.gguf", folder)
    said = refusal(capsys, "generate", "hello", "--model", str(tmp_path / "bare.gguf"))
    assert "bare.gguf has no tokenizer (tokenizer.ggml.tokens); without it" in said


def test_a_chat_without_a_template_is_refused_unless_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = without_weights(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    said = refusal(capsys, "chat", "--model", str(folder))
    assert "has no chat template, so it may not be trained for conversations: give one by --chat-template" in said
    said = refusal(capsys, "chat", "--model", str(folder), "--chat-template", "{{ messages[0].content }}")
    assert "no chat template" not in said  # it is the weights' turn


def test_generate_tells_once_that_prompts_are_sent_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    given = ["generate", "the quick", "a lazy", "--model", str(folder), "--max-tokens", "2", "--temperature", "0"]
    assert main([*given, *FLAGS]) == 0
    assert capsys.readouterr().err.count("prompts are sent as they are") == 1
    for more in (["--raw"], ["--chat-template", "{{ messages[0].content }}"]):
        assert main([*given, *FLAGS, *more]) == 0
        assert "prompts are sent" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "embed",
            "does not generate; it embeds texts: penstock serve answers /v1/embeddings with it, LLM.embed in Python",
        ),
        ("score", "does not generate; it scores documents: penstock serve answers /v1/rerank and /v1/score"),
    ],
)
def test_a_model_that_embeds_or_scores_is_refused_with_its_routes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, kind: str, words: str
) -> None:
    folder = without_weights(tmp_path)
    said = refusal(capsys, command, *(["x"] if command == "generate" else []), "--model", str(folder), "--task", kind)
    assert words in said
