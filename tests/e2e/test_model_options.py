"""Options that replace parts of a checkpoint: its chat template, and settings of its config.json."""

import json
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import CheckpointError, ConfigError
from tests.server.running import RunningServer, running_server
from tests.support import fetch
from tests.support.checkpoints import write_tiny_llama
from tests.support.gguf_files import write_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OWN = "{% for message in messages %}quick {{ message['content'] }}{% endfor %}"
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<tool_call>{{ message['content'] }}</tool_call>{% endfor %}"
)
SAID = [{"role": "user", "content": "brown fox"}]
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
OPTIONS = {"kv_cache_memory": "8MiB", "threads": 1}
FLAGS = ("--kv-cache-memory", "8MiB", "--threads", "1")


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_given_template_goes_before_the_models(tiny_llama: Path, tmp_path: Path, is_gguf: bool) -> None:
    model, file = tiny_llama, tmp_path / "own.jinja"
    file.write_text(OWN)
    if is_gguf:
        model = tmp_path / "tiny.gguf"
        write_gguf(model, tiny_llama)
    for template in (str(file), OWN):
        with LLM(str(model), chat_template=template, **OPTIONS) as llm:
            assert llm.tokenizer is not None
            assert llm.tokenizer.decode(llm.encode_chat(SAID)) == "quick brown fox"
            assert llm.chat(SAID, GREEDY)[0].outputs == llm.generate("quick brown fox", GREEDY)[0].outputs


def test_a_missing_template_is_told_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="chat_template: there is no file nowhere"):
        LLM(str(folder), chat_template="nowhere", **OPTIONS)


def test_overrides_have_the_effect_of_an_edited_config(tiny_llama: Path, tmp_path: Path) -> None:
    edited = write_tiny_llama(tmp_path, **YARN)
    prompt = "the quick brown fox jumps over the lazy dog " * 20
    answers = []
    for model, options in ((edited, {}), (tiny_llama, {"hf_overrides": YARN}), (tiny_llama, {})):
        with LLM(str(model), **OPTIONS, **options) as llm:
            answers.append(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_act": "no such"}, "hidden_act 'no such' in .*config.json is not supported"),
        ({"num_attention_heads": "four"}, "num_attention_heads in .*config.json must be an integer"),
        ({"rope_scaling": {"rope_type": "yarn", "foctor": 2.0}}, "factor"),
    ],
)
def test_overrides_are_held_to_what_config_json_is(tiny_llama: Path, overrides: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        LLM(str(tiny_llama), hf_overrides=overrides, **OPTIONS)


def test_an_unknown_override_is_warned_about_as_in_config_json(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(tiny_llama), hf_overrides={"no_such_setting": 1}, **OPTIONS):
        assert "no_such_setting" in caplog.text


def test_overrides_for_a_gguf_file_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama)
    with pytest.raises(ConfigError, match=r"hf_overrides .* tiny\.gguf, a GGUF file, has none: leave them out"):
        LLM(str(tmp_path / "tiny.gguf"), hf_overrides=YARN, **OPTIONS)


def test_a_fleet_serves_the_given_template_and_overrides_also_after_a_reload(tiny_llama: Path, tmp_path: Path) -> None:
    """The form of its tool calls is that of the template, too."""
    file = tmp_path / "tools.jinja"
    file.write_text(TOOLS)
    flags = ("--chat-template", str(file), "--hf-overrides", json.dumps({"max_position_embeddings": 256}))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with running_server("--model", str(tiny_llama), *FLAGS, "--engines", "2", "--admin", *flags) as server:
        for _ in range(2):
            (model,) = fetch.get(f"{server.url}/v1/models").json()["data"]
            assert model["max_model_len"] == 256
            called = server.post(
                "/v1/chat/completions", messages=SAID, tools=tools, tool_choice="required", max_tokens=200
            ).json()["choices"][0]
            assert called["message"]["tool_calls"][0]["function"]["name"] == "look", called
            assert server.post("/v1/admin/reload", model=None).status_code == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chat-template", "nowhere.jinja"), "chat_template: there is no file nowhere.jinja"),
        (("--chat-template", "{% if messages %}"), "chat_template: the model's chat template says"),
        (("--hf-overrides", "[]"), "hf_overrides must be a JSON object"),
        (("--revision", "v1"), "revision is for models of the Hugging Face hub"),
    ],
)
def test_a_server_ends_at_once_with_the_reason(tiny_llama: Path, flags: tuple[str, ...], words: str) -> None:
    server = RunningServer("--model", str(tiny_llama), *FLAGS, *flags)
    assert (server.wait(), server.stop()) == (2, 2)
    assert any(words in line for line in server.log), server.log
