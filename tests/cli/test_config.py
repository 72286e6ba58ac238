"""`penstock config init` writes a file that `penstock serve --config` takes."""

import re
import stat
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config.engine_config import iter_options
from penstock.server.config import iter_server_options
from penstock.system.toml import read_toml


def test_the_file_sets_what_is_given_and_has_every_option_as_a_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    assert main(["config", "init", "--port", "9000", "--model", "some/model", str(path)]) == 0
    assert read_toml(str(path)) == {"model": "some/model", "port": 9000}
    names = re.findall(r"^(?:# )?(\w+) =", path.read_text(), re.MULTILINE)
    assert sorted(names) == sorted(f.name for _, f in (*iter_options(), *iter_server_options()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it may hold a key"
    assert main(["serve", "--config", str(path), "--print-config"]) == 0
    assert "port = 9000" in capsys.readouterr().out


def test_every_default_is_a_value_that_the_option_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "penstock.toml"
    main(["config", "init", str(path)])
    path.write_text(re.sub(r'^# (\w+ = (?!""$).)', r"\1", path.read_text(), flags=re.MULTILINE))
    assert main(["serve", "--config", str(path), "--print-config"]) == 0, capsys.readouterr().err


def test_a_file_is_replaced_on_request_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("port = 1234\n")
    assert main(["config", "init", str(path)]) == 2
    assert path.read_text() == "port = 1234\n"
    assert "add --force to replace it" in capsys.readouterr().err
    assert main(["config", "init", "--force", str(path)]) == 0
    assert read_toml(str(path)) == {}
