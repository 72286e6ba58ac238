"""Runs an agent's command in a home and a project of its own, without the user's settings, keys and telemetry."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["AGENT_FOLDER"])
PROJECT = Path(os.environ["AGENT_PROJECT"])
LONGEST_RUN = 100.0
"""Seconds."""
PASSED_ON = ("PATH", "LANG", "TERM", "TMPDIR")
"""Variables of the user's that an agent sees; no other: there may be keys among them."""
QUIET = {"DO_NOT_TRACK": "1", "NO_UPDATE_NOTIFIER": "1", "NO_COLOR": "1", "CI": "1"}


def program(name: str) -> str:
    """A command that npm or pip has installed."""
    found = [folder / name for folder in (FOLDER / "node_modules" / ".bin", FOLDER / "bin")]
    return str(next(path for path in found if path.exists()))


def new_home() -> Path:
    """An empty home, and a project with a note in it."""
    home = FOLDER / "home"
    for folder in (home, PROJECT):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    (PROJECT / "note.txt").write_text("seven\n")
    return home


def run_agent(command: Sequence[str], home: Path, variables: Mapping[str, str]) -> str:
    """What an agent's command prints; it must end well."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "XDG_DATA_HOME": str(home / ".data")}
    environment |= {
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_STATE_HOME": str(home / ".state"),
        **QUIET,
        **variables,
    }
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def lines(printed: str) -> list[dict[str, Any]]:
    """The JSON documents that an agent prints, one a line."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
