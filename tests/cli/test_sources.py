"""Flags before environment before file; what is misspelt is refused; what is shown can be read again."""

import pytest

from penstock.cli import main
from penstock.cli.sources import gather, show
from penstock.config.engine_config import EngineConfig, iter_options, parse_overrides
from penstock.errors import ConfigError
from penstock.system.toml import read_toml
from tests.support.needs import needs_torch

OPTIONS = [f for _, f in iter_options()]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text('max_num_seqs = 1\nseed = 1\ndtype = "float32"\nenable_prefix_caching = false\n')
    return str(path)


def values(given):
    return {name: one.value for name, one in given.items()}


def test_a_flag_goes_before_the_environment_and_that_before_the_file(file):
    given = gather(OPTIONS, {"max_num_seqs": "3"}, {"PENSTOCK_MAX_NUM_SEQS": "2", "PENSTOCK_SEED": "2"}, file)
    assert values(given) == {"max_num_seqs": "3", "seed": "2", "dtype": "float32", "enable_prefix_caching": False}
    assert [given[name].source for name in ("max_num_seqs", "seed", "dtype")] == ["flag", "PENSTOCK_SEED", file]


def test_a_misspelt_option_is_refused_wherever_it_stands(tmp_path):
    with pytest.raises(
        ConfigError, match="PENSTOCK_MAX_SEQS, but there is no option 'max_seqs'; did you mean 'max_num_seqs'"
    ):
        gather(OPTIONS, {}, {"PENSTOCK_MAX_SEQS": "2"}, None)
    path = tmp_path / "bad.toml"
    for content, message in (
        ("max_seqs = 2", "unknown option 'max_seqs'; did you mean 'max_num_seqs'"),
        ("[seed]\nx = 1", "unknown option 'x'|seed must be a single value"),
        ("seed = [1]", "seed must be a single value"),
        ("seed = ", "not valid TOML: at "),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            gather(OPTIONS, {}, {}, str(path))


def test_an_option_that_is_a_json_object_may_be_a_table(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text('[hf_overrides.rope_scaling]\nrope_type = "yarn"\nfactor = 4.0\n')
    given = values(gather(OPTIONS, {}, {}, str(path)))
    overrides = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert parse_overrides(EngineConfig.from_options(**given).model.hf_overrides) == overrides


def test_variables_of_others_are_left_alone(file):
    environment = {"PATH": "x", "PENSTOCK_PORT": "tcp://10.0.0.1:8000", "PENSTOCK_SERVICE_HOST": "10.0.0.1"}
    environment |= {"PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1", "PENSTOCK_CONFIG": file}
    assert gather(OPTIONS, {}, environment, None) == {}


def test_the_configuration_is_shown_with_its_sources_without_secrets_and_can_be_read_again(
    tmp_path, file, monkeypatch, capsys
):
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-secret")
    assert main(["serve", "--print-config", "--config", file, "--port", "99"]) == 0
    shown = capsys.readouterr().out
    assert "port = 99  # flag" in shown
    assert f'dtype = "float32"  # {file}' in shown
    assert "# api_key is set, but not shown (PENSTOCK_API_KEY)" in shown
    assert "sk-secret" not in shown
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert read_toml(again)["enable_prefix_caching"] is False
    assert main(["serve", "--print-config", "--config", str(again)]) == 0


def test_default_sampling_is_shown_and_can_be_read_again(tmp_path, capsys):
    assert main(["serve", "--print-config", "--default-sampling", '{"temperature": 0.7}']) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "again.toml"
    path.write_text(shown)
    assert read_toml(path)["default_sampling"] == '{"temperature": 0.7}'
    assert main(["serve", "--print-config", "--config", str(path)]) == 0


@pytest.mark.parametrize("way", ["environment", "variable", "flag"])
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["verify"]])
def test_the_other_commands_take_the_environment_and_files_too_and_pass_over_the_servers_options(
    command, way, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PENSTOCK_PORT", "99")
    path = tmp_path / "penstock.toml"
    path.write_text('model = "/nowhere"\nhost = "0.0.0.0"\n')
    if way == "environment":
        monkeypatch.setenv("PENSTOCK_MODEL", "/nowhere")
    elif way == "variable":
        monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    else:
        command = [*command, "--config", str(path)]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "there is no folder or file /nowhere" in told
    assert f"(model is from {'PENSTOCK_MODEL' if way == 'environment' else path})" in told
    assert main([*command, "--model", "/elsewhere"]) == 2
    told = capsys.readouterr().err
    assert "there is no folder or file /elsewhere" in told
    assert "is from" not in told


@needs_torch
def test_quantize_takes_its_threads_from_everywhere(tmp_path, monkeypatch, capsys):
    (tmp_path / "penstock.toml").write_text("threads = 0\nport = 1\n")
    assert main(["quantize", "x", "y", "--config", str(tmp_path / "penstock.toml")]) == 2
    assert f"threads is from {tmp_path}/penstock.toml" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_THREADS", "many")
    assert main(["quantize", "x", "y"]) == 2
    assert "threads must be a whole number, not 'many' (threads is from PENSTOCK_THREADS)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_num_seqs", "abc", "max_num_seqs must be a whole number, not 'abc'"),
        ("port", "70000", "port must be from 0 to 65535, not 70000"),
        ("max_connections", "5", "max_connections (5) must be at least max_concurrent_requests (1024)"),
        ("tls_key", "/x.pem", "tls_key needs tls_cert"),
    ],
)
def test_a_bad_value_of_the_environment_or_the_file_names_its_source(name, value, words, tmp_path, monkeypatch, capsys):
    path = tmp_path / "penstock.toml"
    path.write_text(f'{name} = "{value}"\n')
    flag = f"--{name.replace('_', '-')}"
    variable = f"PENSTOCK_{name.upper()}"
    assert main(["serve", "--print-config", flag, value]) == 2
    assert capsys.readouterr().err == f"penstock: error: {words}\n"
    assert main(["serve", "--print-config", "--config", str(path)]) == 2
    assert f"{words} ({name} is from {path})" in capsys.readouterr().err
    monkeypatch.setenv(variable, value)
    assert main(["serve", "--print-config"]) == 2
    assert f"{words} ({name} is from {variable})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("max_num_seqs", "0"), ("kv_cache_memory", "1B"), ("quantization", "int9")]
)
def test_a_value_that_only_the_engine_refuses_names_its_source_too(name, value, monkeypatch, capsys):
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", value)
    for command in (["generate", "hi"], ["verify"]):
        assert main(command) == 2
        assert f"({name} is from PENSTOCK_{name.upper()})" in capsys.readouterr().err


def test_nothing_is_shown_of_an_option_that_is_not_set():
    assert "# seed is not set (default)" in show([("engine", OPTIONS)], {f.name: None for f in OPTIONS}, {})
