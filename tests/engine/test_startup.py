"""What happens beside the import of an engine's modules."""

import gc
import sys
from pathlib import Path

import pytest

from penstock import LLM, llm
from penstock.checkpoint.checkpoint import open_model
from penstock.config.engine_config import EngineConfig
from penstock.engine import build, startup
from penstock.errors import CheckpointError
from penstock.models.loading import packed_key


def test_garbage_is_not_collected_until_all_is_imported_and_loaded() -> None:
    with startup.starting(EngineConfig()):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_packed_weights_are_looked_for_only_while_there_is_something_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for = []
    monkeypatch.setattr(startup, "_find_packed", looked_for.append)
    config = EngineConfig()
    assert build.__name__ == startup._LAST_IMPORTED
    with startup.starting(config):
        assert not looked_for
    monkeypatch.delitem(sys.modules, startup._LAST_IMPORTED)
    with startup.starting(config):
        assert looked_for == [config]


def test_garbage_is_collected_again_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), startup.starting(EngineConfig()):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_garbage_is_collected_while_a_model_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting = []

    def download(*_: object) -> Path:
        collecting.append(gc.isenabled())
        raise CheckpointError("the hub is down")

    monkeypatch.setattr(llm, "find_on_disk", lambda *_: None)
    monkeypatch.setattr(llm, "resolve_path", download)
    with pytest.raises(CheckpointError, match="the hub is down"):
        LLM("nobody/has-this")
    assert collecting == [True]


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_imported_counts_as_old_and_what_was_frozen_stays_so(frozen: bool) -> None:
    gc.unfreeze()  # what conftest.py froze
    gc.collect()
    if frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        with startup.starting(EngineConfig()):
            new = [[number] for number in range(1000)]
        assert count - 100 < gc.get_freeze_count() <= count  # a frozen object may be freed
        young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
        assert frozen or not young.intersection(map(id, new))
    finally:
        gc.unfreeze()


def test_the_plan_is_that_of_a_model_in_a_folder(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_llama.parent))
    expected = startup._expected_settings
    found = expected(EngineConfig.from_options(model=f"~/{tiny_llama.name}", kv_cache_memory="4MiB"))
    assert found is not None
    assert found.memory.kv_cache <= 4 * 2**20
    assert expected(EngineConfig.from_options(model="nobody/has-this")) is None
    assert expected(EngineConfig.from_options(model=str(tiny_llama), max_model_len=10**9)) is None


def test_the_demo_model_is_large_enough_to_be_cached() -> None:
    config = EngineConfig.from_options(device="cpu")
    settings = startup._expected_settings(config)
    assert settings is not None
    assert packed_key.packed_key(open_model(config.model), settings) is not None
