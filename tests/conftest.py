"""Fixtures that more than one test folder uses. Nothing is downloaded: checkpoints are written at run time."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from penstock.system.extras import has_torch
from tests.support.library import explain_missing_library

if TYPE_CHECKING:
    from tests.support.command_line import Run

if not has_torch():
    from tests.support.without_torch import (  # noqa: F401  hooks
        pytest_make_collect_report,
        pytest_runtest_call,
        pytest_runtest_setup,
    )

# No deadline for one example: the machines that run the tests are shared, and a slow moment is no failure.
hypothesis.settings.register_profile("penstock", deadline=None)
hypothesis.settings.load_profile("penstock")


def pytest_sessionstart() -> None:
    """Without the native library the tests of the kernels would be skipped, and nobody would notice."""
    missing = explain_missing_library()
    if missing is not None:
        raise pytest.UsageError(missing)
    gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """The millions of objects of the libraries and of all tests stay: no garbage collection is to visit them again."""
    gc.freeze()
    gc.enable()


RAY = "ray"
LONGEST = [
    RAY,
    *("test_gpu_day", "test_serve", "test_agent_bodies", "test_fuzz", "test_triton", "test_limits", "test_fleet"),
    *("test_soak", "test_interrupts", "test_hostile", "test_encoders", "test_ranks", "test_install", "test_families"),
]
"""Groups that take longest, by names of files: begun last, one of them would run when the other processes are idle."""


def group_of(file: str) -> str:
    return RAY if "_ray" in Path(file).stem else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(Path(group_of(str(item.path))).stem, len(LONGEST)))


class Groups(LoadScopeScheduling):
    """Tests of a file share servers, so one process runs them; one runs all that start Ray."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.split("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Groups(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed weights of tests, and of the servers that they start, do not go to the user's cache, nor chats' lines;
    nor do aliases and created models come from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Run":
    """Runs a command in this process."""
    from tests.support.command_line import run_command

    return functools.partial(run_command, monkeypatch, capsys)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random float32 Llama of two layers, a context of 512, and a tokenizer with a chat template."""
    from tests.support.checkpoints import write_tiny_llama  # here: it loads the native library, and tokenizers

    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
