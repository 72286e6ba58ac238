"""Flags that there are not: the one that was meant is named, in a line."""

import re
import subprocess
import sys

import pytest

from penstock.cli import main, make_parser
from penstock.cli.parser import FOREIGN_FLAGS
from penstock.cli.topics import _TITLE_OF, COMMON
from penstock.config.engine_config import FOREIGN_OPTIONS, EngineConfig, iter_options
from penstock.errors import ConfigError
from penstock.server.config import iter_server_options


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("generate --modle x hi", "penstock generate: error: there is no flag --modle; did you mean --model? (see"),
        ("generate hi -c 4096", "there is no flag -c; here it is --max-model-len"),
        ("generate -m x hi", "there is no flag -m; here it is --model"),
        ("generate --prompt hi", "there is no flag --prompt; here it is a prompt as an argument"),
        ("chat --ctx-size=4096", "there is no flag --ctx-size; here it is --max-model-len"),
        ("serve --gpu-memory-utilization 0.9", "here it is --kv-cache-memory"),
        ("serve x --n-gpu-layers 99", "here it is --device"),
        ("serve --xyz", "error: there is no flag --xyz (see penstock serve --help)"),
        ("serve one two", "penstock serve: error: unexpected argument 'two'"),
        ("quantize a b --treads 2", "did you mean --threads?"),
        ("--verison", "penstock: error: there is no flag --verison; did you mean --version?"),
        ("serv", "invalid choice: 'serv'"),
        ("generate --top-k many hi", "argument --top-k: invalid int value: 'many'"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, *command.split())


def test_flags_of_other_programs_lead_to_flags_that_exist() -> None:
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    flags = {flag for name in ("serve", "chat", "generate") for flag in commands[name]._option_string_actions}  # type: ignore[index]
    assert {ours for ours in FOREIGN_FLAGS.values() if ours.startswith("-")} <= flags
    assert not set(FOREIGN_FLAGS) & flags
    names = {f.name for _, f in iter_options()}
    assert set(FOREIGN_OPTIONS.values()) <= names
    with pytest.raises(ConfigError, match="'gpu_memory_utilization'; here it is 'kv_cache_memory'"):
        EngineConfig.from_options(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="here it is 'media', with the opposite value"):
        EngineConfig.from_options(language_model_only=True)


@pytest.mark.parametrize(("arguments", "usage"), [([], "penstock"), (["serve"], "penstock serve")])
def test_help_is_also_a_command(arguments: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", *arguments])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {usage} ")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: penstock ")


def test_serve_takes_the_model_as_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "some/model", "--print-config"]) == 0
    assert 'model = "some/model"  # flag' in capsys.readouterr().out
    assert main(["serve", "some/model", "--model", "other"]) == 2
    assert "two models are named" in capsys.readouterr().err


def test_the_package_can_be_run_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.split()[0]) == (0, "penstock")


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


ALL_FLAGS = re.compile(r"^  (?:-\w.*?, )?(--[a-z][\w-]*)", re.MULTILINE)


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "verify"])
def test_help_shows_what_people_set_and_all_of_it_every_flag_by_topic(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, full = help_of(capsys, command, "--help"), help_of(capsys, command, "--help", "all")
    assert max(map(len, full.splitlines())) <= 80
    assert 12 <= len(ALL_FLAGS.findall(short)) <= 26
    parser = make_parser()._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr,index]
    hidden = len(ALL_FLAGS.findall(full)) - len(ALL_FLAGS.findall(short))
    assert f"penstock {command} --help all shows {hidden} more options" in short
    every = {action.option_strings[0] for action in parser._actions if action.option_strings}
    assert set(ALL_FLAGS.findall(full)) == every - {"-h", "--help-all"} | {"--help"}
    assert help_of(capsys, command, "--help-all") == full == help_of(capsys, "help", command, "all")


def test_the_help_begins_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "generate", "verify"):
        short = help_of(capsys, command, "--help")
        assert next(flag for flag in ALL_FLAGS.findall(short.partition("common options:")[2])) == "--model"


def test_tgis_options_have_a_topic_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    full = help_of(capsys, "serve", "--help", "all")
    topic = full.partition("text-generation-inference's batching:")[2].partition("\n\n")[0]
    assert len(ALL_FLAGS.findall(topic)) == topic.count("(TGI compatibility)") == 4
    assert full.count("(TGI compatibility) ") == 4


def test_every_option_that_is_named_for_the_help_exists() -> None:
    names = {f.name for _, f in (*iter_options(), *iter_server_options())}
    assert {*COMMON, *_TITLE_OF} <= names
