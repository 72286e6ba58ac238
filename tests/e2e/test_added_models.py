"""Models, names and adapters that clients gave to a server are there when the next one starts, also after `kill -9`."""

import os
import signal
from pathlib import Path

import httpx
import ollama
import pytest

from penstock.checkpoint.created import name_adapter
from penstock.checkpoint.created import write_adapter as write_stored
from tests.server.running import RunningServer, running_server
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_tiny_llama
from tests.support.gguf_files import write_gguf

PEFT = ("adapter_config.json", "adapter_model.safetensors")
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = {"num_predict": 4, "temperature": 0}


def said(client: ollama.Client, *names: str) -> list[str | None]:
    return [client.chat(name, HELLO, options=OPTIONS).message.content for name in names]


def names_of(client: ollama.Client) -> list[str]:
    return [str(model.model).removesuffix(":latest") for model in client.list().models]


def kill(server: RunningServer) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def test_what_clients_added_survives_replacement_and_restarts(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--threads", "1", "--max-num-seqs", "4", "--admin", "--adapter-memory", "1MiB")
    flags += ("--added-models", str(tmp_path / "added.json"))
    several = ("--model", f"tiny={tiny_llama}", "--keep-alive", "5m", *flags)
    with running_server(*several) as first, ollama.Client(first.url) as client:
        client.create("mario", from_="tiny", system="You are Mario.")
        for source, name in (("mario", "chat"), ("tiny", "small")):
            client.copy(source, name)
        folder = write_adapter(tmp_path / "adapter", tiny_llama)
        client.create("tuned", from_="mario", adapters={name: client.create_blob(folder / name) for name in PEFT})
        before = said(client, "mario", "chat", "tuned")
        assert before[0] == before[1] != before[2]
        client.create("mario", from_="mario", parameters={"top_k": 1})
        assert names_of(client) == ["tiny", "small", "mario", "chat", "tuned"]
        assert said(client, "tuned", "mario", "chat") == [before[2], before[0], before[0]]
        kill(first)
    with running_server(*several) as second, ollama.Client(second.url) as client:
        assert names_of(client) == ["tiny", "small", "mario", "chat", "tuned"]
        assert any("and are served again: mario, small, chat, tuned (" in line for line in second.log)
        assert said(client, "chat", "tuned") == [before[0], before[2]]
        other = tmp_path / "other.gguf"
        write_gguf(other, write_tiny_llama(tmp_path / "other", hidden_size=32), "F16")
        client.create("mario", files={"other.gguf": client.create_blob(other)}, template="{{ messages[0].content }}")
        assert said(client, "chat") != [before[0]]
        assert names_of(client) == ["tiny", "small", "mario", "chat"]
        assert any("the adapter tuned of the model mario is not served: " in line for line in second.log)
        with pytest.raises(ollama.ResponseError, match="not served here"):
            said(client, "tuned")
        client.delete("tuned")
        client.delete("chat")
        kill(second)
    remains = name_adapter(write_stored({}, tmp_path / "added.json"), "killed")
    single = ("--model", str(tiny_llama), "--served-model-name", "tiny", *flags)
    with running_server(*single) as third, ollama.Client(third.url) as client:
        assert names_of(client) == ["tiny", "small", "mario"]
        assert not remains.exists()
        assert said(client, "small")
        assert any("not those that were added to an earlier one: mario;" in line for line in third.log)
        kill(third)
    with running_server(*several) as last, ollama.Client(last.url) as client:
        assert names_of(client) == ["tiny", "small", "mario"]
        client.copy("mario", "luigi")
        before = said(client, "mario")
        client.delete("mario")
        assert httpx.get(f"{last.url}/v1/models/mario").status_code == 404
        kill(last)
    with running_server(*several) as again, ollama.Client(again.url) as client:
        assert names_of(client) == ["tiny", "small", "luigi"]
        assert any("and are served again: small, luigi (" in line for line in again.log)
        assert said(client, "luigi") == before
        client.delete("luigi")
        assert '"mario"' not in (tmp_path / "added.json").read_text()
