"""Ollama's `/api/create` by its Python package over a real socket: uploads, settings, names, and refusals."""

import hashlib
import json
import socket
from pathlib import Path

import httpx
import ollama
import pytest

from penstock.checkpoint import created
from penstock.checkpoint.added import Added, file_of_address
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import InvalidRequestError
from penstock.fleet.model_broker import ModelStatus
from penstock.server.listed import Listed
from penstock.server.ollama.library import check_unused
from penstock.text.tokenizer import Tokenizer
from tests.server.running import running_server
from tests.support.adapters import write_adapter, write_gguf_adapter
from tests.support.gguf_files import write_gguf

HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"num_predict": 6}
PEFT = dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), "")
MARIO = "You are Mario."
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
GO = "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"


@pytest.fixture(scope="module")
def url(tiny_llama):
    flags = ("--served-model-name", "tiny", "--threads", "1", "--admin", "--max-num-seqs", "4")
    flags += ("--adapter-memory", "1MiB")
    with running_server("--model", str(tiny_llama), *flags) as running:
        yield running.url


@pytest.fixture
def client(url):
    with ollama.Client(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tiny_llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama, "Q8_0")
    return path


def test_a_created_model_is_listed_shown_served_and_deleted(client, file, penstock):
    digest = client.create_blob(file)
    parameters = {"temperature": 0, "num_ctx": 64, "stop": ["no such text"], "num_gpu": 1}
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    made = {"files": {"tiny.gguf": digest}, "template": TEMPLATE, "system": MARIO, "parameters": parameters}
    states = list(client.create("mario:latest", **made, messages=messages, license="MIT", stream=True))
    assert [state.status for state in states][-1] == "success"
    listed = {model.model: model for model in client.list().models}
    assert listed["mario:latest"].size == file.stat().st_size
    shown = client.show("mario")
    assert (shown.template, shown.license, shown.modelinfo["llama.context_length"]) == (TEMPLATE, "MIT", 64)
    assert "num_ctx" in shown.parameters
    assert MARIO in shown.modelfile
    with pytest.raises(ollama.ResponseError, match="penstock serve mario"):
        client.chat("mario", HELLO)
    client.create("luigi", from_="mario", system="You are Luigi.")
    client.copy("luigi", "wario")
    printed = penstock("list").stdout
    assert [line.split()[0] for line in printed.splitlines()] == ["luigi", "mario", "wario"]
    printed = penstock("show", "luigi").stdout
    assert 'system      "You are Luigi."' in printed

    with pytest.raises(InvalidRequestError, match="its files are those of the served model 'chat'"):
        check_unused([Listed("chat", "mario", 0, None, ModelStatus(), None)], created.find_created("mario"), "model")
    flags = ("--threads", "1", "--max-num-seqs", "4", "--admin")
    with running_server("mario", *flags) as served, ollama.Client(served.url) as there:
        assert next(model.model for model in there.list().models) == "mario:latest"
        assert there.ps().models[0].context_length == 64
        assert httpx.post(f"{served.url}/api/show", json={"model": "mario"}).json()["system"] == MARIO
        whole = [{"role": "system", "content": MARIO}, *messages, *HELLO]
        text = "".join(f"{one['role']}: {one['content']}\n" for one in whole)
        said = there.generate("mario", text, raw=True, options=SHORT)
        answered = there.chat("mario", HELLO, options=SHORT)
        assert answered.message.content == said.response
        assert answered.prompt_eval_count == said.prompt_eval_count
        other = there.chat("mario", [{"role": "system", "content": "Another."}, *HELLO], options=SHORT)
        assert other.prompt_eval_count != answered.prompt_eval_count
        with pytest.raises(ollama.ResponseError, match="served here under this name"):
            there.copy("luigi", "mario")
        with pytest.raises(ollama.ResponseError, match="is the served model itself"):
            there.delete("mario")
        with pytest.raises(ollama.ResponseError, match=r"exceed|too long"):
            there.chat("mario", [{"role": "user", "content": "word " * 64}])

    assert created.blob_path(digest.removeprefix("sha256:")).is_file()
    for name in ("mario", "luigi"):
        client.delete(name)
    assert created.blob_path(digest.removeprefix("sha256:")).is_file()
    printed = penstock("rm", "wario").stdout
    assert printed.startswith("wario: deleted ")
    assert not created.blob_path(digest.removeprefix("sha256:")).exists()
    with pytest.raises(ollama.ResponseError, match="there is no model"):
        client.delete("wario")


def test_the_files_of_a_created_model_stay_for_its_names_in_other_servers(client, file):
    client.create("peach", files={"tiny.gguf": client.create_blob(file)})
    other = file_of_address(11999)
    other.change(lambda _: Added(("peach",)).with_name("toad", "peach"))
    client.delete("peach:latest")
    assert other.read() == Added(("peach",), {"toad": "peach"}, deleted=("peach",))
    with pytest.raises(ollama.ResponseError, match="to be deleted first: toad in the server of port-11999"):
        client.delete("peach")
    assert created.find_created("peach") is not None
    other.change(lambda _: Added())
    client.delete("peach")
    assert created.find_created("peach") is None


def test_an_adapter_is_served_by_its_name_until_it_is_deleted(client, tiny_llama, tmp_path):
    folder = write_adapter(tmp_path / "adapter", tiny_llama, seed=41)  # no other test uploads its files
    digests = {name: client.create_blob(folder / name) for name in PEFT}
    client.create("tuned", from_="tiny", adapters=digests)
    plain, tuned = (client.chat(name, HELLO, options=SHORT | {"temperature": 0}) for name in ("tiny", "tuned"))
    assert tuned.message.content != plain.message.content
    gguf = client.create_blob(write_gguf_adapter(tmp_path / "tuned.gguf", tiny_llama, folder))
    client.create("gguf", from_="tiny", adapters={"tuned.gguf": gguf})
    again = client.chat("gguf", HELLO, options=SHORT | {"temperature": 0})
    assert again.message.content == tuned.message.content
    client.delete("gguf")
    created.delete_unused_blobs()
    blobs = [created.blob_path(digest.removeprefix("sha256:")) for digest in digests.values()]
    assert all(blob.is_file() for blob in blobs)
    client.delete("tuned")
    assert not any(blob.exists() for blob in blobs)


def test_the_served_model_gets_settings_of_its_own(client, tiny_llama):
    client.create(
        "terse", from_="tiny", system="Be terse.", parameters={"temperature": 0.5, "top_k": -1, "stop": "END"}
    )
    checkpoint = open_checkpoint("terse")
    defaults = checkpoint.generation
    assert (defaults.temperature, defaults.top_k, defaults.stop) == (0.5, 0, ("END",))
    ours, plain = Tokenizer.from_path(checkpoint.path), Tokenizer.from_path(tiny_llama)
    system = {"role": "system", "content": "Be terse."}
    assert ours.apply_chat_template(HELLO) == plain.apply_chat_template([system, *HELLO])
    for one in (ours, plain):
        one.close()
    client.create("terse", from_="terse", parameters={"stop": []})  # replaces it
    assert open_checkpoint("terse").generation.temperature == 0.5
    client.delete("terse")
    assert (tiny_llama / "model.safetensors").is_file()


def test_what_cannot_be_created_is_refused_by_name(client, url, file, tmp_path):
    digest, other = client.create_blob(file), "sha256:" + "0" * 64
    wrong = {"tiny.gguf": digest}
    broken = tmp_path / "broken"
    broken.write_bytes(b"GGUF" + bytes(20))
    damaged = client.create_blob(broken)
    for body, said in (
        ({"model": "x"}, "either of `files`"),
        ({"model": "x", "from": "tiny", "files": wrong}, "either of `files`"),
        ({"model": "x", "from": "/etc", "system": "Hi"}, "no model '/etc' on this machine"),
        ({"model": "x", "files": {"tiny.gguf": other}}, "upload it to /api/blobs"),
        ({"model": "x", "files": {"../tiny.gguf": digest}}, "only GGUF files"),
        ({"model": "x", "files": {"tiny.gguf": damaged}}, "GGUF version 0"),
        ({"model": "x", "files": wrong, "template": GO}, "not Ollama's Go templates"),
        ({"model": "x", "files": wrong, "parameters": {"seed": 1}}, "parameters.seed is not supported"),
        ({"model": "x", "files": wrong, "parameters": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"model": "x", "files": wrong, "adapters": {"a": digest}}, "an adapter is added to the served model"),
        ({"model": "x", "from": "tiny", "adapters": {"a.gguf": digest}}, "only lora is supported"),
        ({"model": "x", "from": "tiny", "adapters": {"../a.gguf": digest}}, "or one GGUF file"),
        ({"model": "x", "from": "tiny", "adapters": PEFT | dict.fromkeys(PEFT, digest)}, "adapter_config.json"),
        ({"model": "x", "files": wrong, "quantize": "q4_0"}, "quantize is not supported"),
        ({"model": "tiny", "files": wrong}, "is served here under this name"),
        ({"model": "..", "files": wrong}, "a letter or digit first"),
    ):
        answer = httpx.post(f"{url}/api/create", json=body)
        assert answer.status_code in (400, 404), body
        assert said in answer.json()["error"], answer.json()
    assert "x" not in [one.name for one in created.created_models()]
    assert not list(created.blob_path("x").parent.parent.glob("created/.*"))


def test_uploads_are_compared_with_their_digest_and_bounded(client, url, monkeypatch, tmp_path):
    content = b"some bytes" * 300_000
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    blob = f"{url}/api/blobs/{digest}"
    assert httpx.head(blob).status_code == 404
    wrong = httpx.post(blob, content=content + b"!")
    assert (wrong.status_code, "the content has the digest" in wrong.json()["error"]) == (400, True)
    pieces = (content[first : first + 65_536] for first in range(0, len(content), 65_536))
    assert httpx.post(blob, content=pieces).status_code == 201
    assert httpx.head(blob).status_code == 200
    stored = created.blob_path(digest.removeprefix("sha256:"))
    assert stored.read_bytes() == content
    assert [path for path in stored.parent.iterdir() if path.name.startswith(f"{stored.name}.")] == []
    assert httpx.post(f"{url}/api/blobs/sha256:12", content=b"x").status_code == 400
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=60) as talking:
        head = f"POST /api/blobs/sha256:{'1' * 64} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**60}\r\n\r\n"
        talking.sendall(head.encode())
        assert b" 413 " in talking.recv(65_536).split(b"\r\n")[0]
    monkeypatch.setattr(created, "_UNUSED_SECONDS", -1.0)
    created.delete_unused_blobs()
    assert not stored.exists()


def test_only_operators_upload_and_create(server):
    for method, path in (
        ("HEAD", "blobs/sha256:" + "0" * 64),
        ("POST", "blobs/sha256:" + "0" * 64),
        ("POST", "create"),
    ):
        content = json.dumps({"model": "x", "from": "tiny"}).encode()
        assert httpx.request(method, f"{server.url}/api/{path}", content=content).status_code == 403


def test_a_damaged_recipe_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    files = {path.name: path for path in tiny_llama.iterdir()}
    made = created.name_created(created.write_created(files, created.Recipe()), "a/b:1")
    assert open_checkpoint("a/b:1").path == made
    (made / created.RECIPE).write_text("{}")
    with pytest.raises(created.CheckpointError, match="create the model again"):
        open_checkpoint("a/b:1")
