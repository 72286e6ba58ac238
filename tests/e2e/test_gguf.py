"""GGUF files from end to end: the command line, the server with the OpenAI client, `LLM` and a draft model."""

import json
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from openai.types.shared_params.response_format_json_schema import JSONSchema

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError
from tests.server.running import running_server
from tests.support.command_line import Run
from tests.support.gguf_files import write_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SMALL = ("--kv-cache-memory", "8MiB", "--threads", "1")


@pytest.fixture(scope="module")
def file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Llama of `tiny_llama`, of the same weights."""
    path = tmp_path_factory.mktemp("gguf") / "Tiny-F32.gguf"
    write_gguf(path, tiny_llama)
    return path


@pytest.fixture(scope="module")
def quantized(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "tiny.gguf"
    write_gguf(
        path, tiny_llama, lambda name: "Q5_1" if "attn_v" in name or "ffn_down" in name else "Q4_0", split_after=8
    )
    return next(path.parent.glob("tiny-00001-of-*.gguf"))


def answers(model: Path, **options: object) -> list[list[int]]:
    with LLM(str(model), kv_cache_memory="8MiB", threads=1, **options) as llm:
        assert llm.tokenizer is not None
        prompts = ["the quick brown", [5, 6, 7], llm.encode_chat([{"role": "user", "content": "a lazy dog"}])]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def test_a_file_answers_as_the_folder_that_it_was_made_of(file: Path, tiny_llama: Path) -> None:
    assert answers(file) == answers(tiny_llama)


def test_the_files_of_a_quantized_model_answer_together(quantized: Path) -> None:
    first = answers(quantized)
    assert all(first)
    assert answers(quantized.parent) == first


def test_a_file_of_floats_can_be_rounded_and_a_quantized_one_not(file: Path, quantized: Path) -> None:
    assert all(answers(file, quantization="int8"))
    with pytest.raises(ConfigError, match=r"already quantized \(GGUF\)"):
        answers(quantized, quantization="int8")


def test_a_file_drafts_for_another(file: Path, quantized: Path, tiny_llama: Path) -> None:
    assert answers(file, speculative_model=str(quantized)) == answers(tiny_llama)


def test_the_command_line_takes_a_file(penstock: Run, file: Path, quantized: Path) -> None:
    for model in (file, quantized.parent):
        run = penstock("generate", "hello", "--json", "--max-tokens", "4", "--model", str(model), *SMALL)
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["outputs"][0]["token_ids"]
    run = penstock("chat", "--max-tokens", "4", "--model", str(quantized), *SMALL, given="hello\n")
    assert run.returncode == 0, run.stderr


def test_answers_from_a_quantized_file_depend_on_nothing_but_the_request(penstock: Run, quantized: Path) -> None:
    run = penstock("verify", "--model", str(quantized), "--kv-cache-memory", "32MiB")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "every answer is the same, bit for bit" in run.stdout


def test_a_damaged_file_ends_the_command_with_one_line(penstock: Run, file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100])
    run = penstock("generate", "hello", "--model", str(cut))
    assert run.returncode == 2
    assert run.stderr.startswith(f"penstock: error: {cut} is truncated: its tensor ")
    assert run.stderr.count("\n") == 1


def test_openais_client_talks_to_a_served_file(quantized: Path) -> None:
    with running_server("--model", str(quantized), *SMALL) as server:
        assert server.model == "tiny"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=httpx.Client(trust_env=False))
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the quick brown fox"}]
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 6
        schema: JSONSchema = {
            "name": "a",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        }
        held = client.chat.completions.create(
            model="tiny",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": schema},
            max_tokens=200,
            temperature=0,
            extra_body={"logit_bias": {}},
        )
        if held.choices[0].finish_reason == "stop":
            assert set(json.loads(held.choices[0].message.content or "")) == {"a"}
        client.close()
