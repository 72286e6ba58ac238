"""The command line: most commands run in this process, and in their own where its start or its end is tested."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.engine.core import EngineCore
from penstock.system.worker_process import WorkerProcess
from penstock.text.chat_template import start_rendering
from tests.support.command_line import Run
from tests.support.waiting import alive


def process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> list[str]:
    return [
        "--model",
        str(tiny_llama),
        "--kv-cache-memory",
        "8MiB",
        "--threads",
        "1",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
    ]


def test_help_names_every_option_of_the_engine(penstock: Run) -> None:
    from penstock.config.engine_config import iter_options

    for more in (["--help", "all"], ["--help-all"]):
        text = penstock("generate", *more).stdout
        for _, field in iter_options():
            assert "--" + field.name.replace("_", "-") in text


def test_the_readmes_example_is_answered_by_the_demo_model() -> None:
    run = process("generate", "What is 37 + 58?")
    assert run.returncode == 0, run.stderr
    assert "95" in run.stdout
    assert re.search(r"^Memory: [\d.]+ MiB weights \+ up to [\d.]+ [MG]iB KV cache", run.stderr, re.MULTILINE)


def test_loading_is_told_at_once_and_at_its_end(penstock: Run, tiny: list[str], tiny_llama: Path) -> None:
    lines = penstock("generate", "hello", *tiny).stderr.splitlines()
    lines = [line for line in lines if "MiB of weights" not in line]  # told after 5 s, on a busy machine
    assert re.fullmatch(rf"loading {tiny_llama.name}: LlamaForCausalLM, safetensors float32, \d+ MiB", lines[0])
    assert re.fullmatch(r"ready in [\d.]+ s", lines[1])


def test_the_weights_read_are_told_in_lines_every_few_seconds(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.system.loading_progress.INTERVAL", 0.0)
    monkeypatch.setattr("penstock.models.loading.loader.MIN_PIECE_BYTES", 2**14)
    options = ["--model", str(tiny_llama), "--packed-cache", "off", "--threads", "1", "--max-tokens", "1"]
    assert main(["generate", "hello", *options]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "MiB of weights" in line]
    read = [int(line.split()[1]) for line in told]
    assert len(told) > 5
    assert read == sorted(read)
    total = (tiny_llama / "model.safetensors").stat().st_size >> 20
    assert told[-1] == f"read {total} of {total} MiB of weights"


def test_json_has_a_line_a_prompt(penstock: Run, tiny: list[str]) -> None:
    run = penstock("generate", "hello", "fox", "--json", "--logprobs", "2", "--n", "2", *tiny)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["hello", "fox"]
    for line in lines:
        assert len(line["outputs"]) == 2
        answer = line["outputs"][0]
        assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
        best = answer["logprobs"][0]["top"]
        assert len(best) == 2
        for entry in (answer["logprobs"][0], *best):
            assert entry.keys() >= {"token_id", "token", "logprob"}
            assert isinstance(entry["token"], str)


def test_a_prompt_comes_from_standard_input_or_a_file_whole_or_by_lines(
    penstock: Run, tiny: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nfox\n")
    by_lines = penstock("generate", "--file", str(file), "--lines", "--raw", "--json", *tiny)
    assert [json.loads(line)["prompt"] for line in by_lines.stdout.splitlines()] == ["hello", "fox"]
    whole = penstock("generate", "--raw", "--json", *tiny, given="hello\n\nfox\n")
    assert [json.loads(line)["prompt"] for line in whole.stdout.splitlines()] == ["hello\n\nfox\n"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal_each_of_several_answers_stands_below_its_prompt(
    tiny: list[str], is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    prompts = ["hello\nfox", "the quick " * 20]
    assert main(["generate", *prompts, "--raw", *tiny]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("==> ")]
    shown = " ".join(["the quick"] * 6) + " the ..."
    assert headings == (["==> hello fox <==", f"==> {shown} <=="] if is_terminal else [])


def test_words_may_be_ruled_out_and_repetition_penalized(penstock: Run, tiny: list[str]) -> None:
    plain = penstock("generate", "hello", "--raw", "--json", *tiny)
    word = json.loads(plain.stdout)["outputs"][0]["text"][:1]
    controls = ["--repetition-penalty", "1.3", "--frequency-penalty", "0.5", "--bad-word", word]
    run = penstock("generate", "hello", "--raw", "--json", *controls, *tiny)
    assert run.returncode == 0, run.stderr
    assert not json.loads(run.stdout)["outputs"][0]["text"].startswith(word)


def test_an_answer_may_be_held_to_a_schema(penstock: Run, tiny: list[str], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["left", "right"]}')
    run = penstock("generate", "hello", "--raw", "--json-schema", str(schema), *tiny)
    assert run.stdout.strip() in ('"left"', '"right"'), run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--json-schema", "/nowhere.json"], "the schema cannot be read"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere"),
        (["generate", "x", "--max-num-seqs", "none of it"], "max_num_seqs must be a whole number"),
        (["generate", "x", "--top-p", "7"], "top_p must be above 0"),
        (["generate", "x", "--lines"], "not both"),
        (["generate", "--file", "/nowhere.txt"], "cannot be read"),
        (["generate", "--lines", "--file", "/dev/null"], "no prompt: /dev/null is empty"),
        (["chat", "--best-of", "2"], "there is no flag --best-of"),
        (["chat", "--num-beams", "2"], "there is no flag --num-beams"),
        (["generate", "x", "--raw", "--system", "Be brief."], "--raw applies no chat template"),
        (["generate", "x", "--logprobs", "2"], "add --json"),
        (["generate", "x", "--max-tokens", "0"], "no answer to print"),
        (["chat", "--logprobs", "2"], "there is no flag --logprobs"),
        (["serve", "--seed", "9" * 23], "seed must be from 0 to 18446744073709551615"),
        (["generate", "x", "--threads", "100000"], "threads must be at most 1024"),
        (["serve", "--default-sampling", "{"], "default_sampling is not valid JSON"),
        (["serve", "--default-sampling", "[1]"], "default_sampling must be a JSON object"),
        (["serve", "--default-sampling", '{"temprature": 1}'], "'temprature'; did you mean 'temperature'?"),
        (["serve", "--default-sampling", '{"top_p": 7}'], "default_sampling: top_p must be above 0"),
        (["serve", "--default-sampling", '{"top_p": null}'], "default_sampling: top_p must be a number, not null"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_the_exit_code_is_2(penstock: Run, arguments: list[str], words: str) -> None:
    check_mistake(penstock(*arguments), words)


def check_mistake(run: "subprocess.CompletedProcess[str]", words: str) -> None:
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.strip().splitlines() if "loading " not in line]
    assert len(lines) == 1


def test_the_exit_code_of_a_mistake_is_that_of_the_process() -> None:
    check_mistake(process("generate", "x", "--top-p", "7"), "top_p must be above 0")


@pytest.mark.parametrize(("given", "used"), [({}, "4"), ({"OPENBLAS_THREAD_TIMEOUT": "20"}, "20")])
def test_numpys_idle_threads_sleep_at_once_unless_the_user_says_otherwise(given: dict[str, str], used: str) -> None:
    code = """
import os
import penstock.cli as cli
cli.main = lambda: print(os.environ["OPENBLAS_THREAD_TIMEOUT"]) or 0
cli.run()"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")}
    run = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
    assert run.stdout.split() == [used], run.stderr


@pytest.mark.parametrize(
    ("unbuffered", "more"),
    [
        ("", []),  # a stream is flushed by the token, either way
        ("", ["--json", "--n", "2"]),
        ("1", ["--json", "--n", "2"]),
        ("", ["--help"]),
        ("1", ["--help"]),
    ],
)
def test_a_reader_that_has_gone_ends_a_command_quietly(tiny: list[str], unbuffered: str, more: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "penstock.cli", "generate", "hello", *tiny, *more]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open(writer, "w") as pipe:
        run = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    assert "Error" not in run.stderr
    assert run.returncode in ((0, 141) if more == ["--help"] else (141,))  # argparse passes such a failure over


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_checkpoint_without_sampling_defaults_is_sampled_as_told_once_unless_flags_say_otherwise(
    penstock: Run, tiny: list[str], tiny_llama: Path, command: str, tmp_path: Path
) -> None:
    def told(*flags: str) -> list[str]:
        *most, _, _ = tiny  # without the temperature
        run = penstock(command, *most, *flags, given="hello\n")
        assert run.returncode == 0, run.stderr
        return [line for line in run.stderr.splitlines() if "sampling defaults" in line]

    start = "the checkpoint sets no sampling defaults; using"
    assert told() == [f"{start} --temperature 0.8, --top-p 0.95, --top-k 40, --min-p 0.05"]
    assert told("--temperature", "0.5", "--top-k", "0") == [f"{start} --top-p 0.95, --min-p 0.05"]
    assert told("--temperature", "0") == []
    shutil.copytree(tiny_llama, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 0.9}')
    assert told("--model", str(tmp_path / "m")) == []


def test_fallback_sampling_is_what_the_engine_uses(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    add = EngineCore.add_request
    monkeypatch.setattr(EngineCore, "add_request", lambda self, one: (requests.append(one), add(self, one)))
    *most, _, _ = tiny
    assert main(["generate", "hello", *most]) == 0
    params = requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.8, 0.95, 40, 0.05)


def test_chat_remembers_the_conversation_until_reset(penstock: Run) -> None:
    run = penstock("chat", given="My name is Alice.\nWhat is my name?\n/reset\nWhat is 2 + 3?\n/exit\n")
    assert run.returncode == 0, run.stderr
    assert "Alice" in run.stdout.splitlines()[1]
    assert "5" in run.stdout.splitlines()[2]


def test_generate_begins_its_conversations_with_a_system_message(
    penstock: Run, tiny: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    run = penstock("generate", "What is 2 + 3?", "--system", "Answer in words.", "--json")
    assert run.returncode == 0, run.stderr
    without = penstock("generate", "What is 2 + 3?", "--json")
    counts = [json.loads(one.stdout)["num_prompt_tokens"] for one in (without, run)]
    assert counts[0] < counts[1]
    bare = tmp_path / "bare"
    shutil.copytree(tiny_llama, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    run = penstock("generate", "hello", "--system", "Be brief.", *tiny, "--model", str(bare))
    assert run.returncode == 2
    assert "the model has no chat template, so nothing takes --system" in run.stderr


def test_a_model_that_cannot_be_loaded_leaves_no_process_that_renders(
    penstock: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        started.append(start_rendering())
        return started[0]

    monkeypatch.setattr("penstock.cli.flags.start_rendering", start)
    assert penstock("generate", "hello", "--model", str(tmp_path)).returncode == 2
    assert not alive(started[0].pid)
