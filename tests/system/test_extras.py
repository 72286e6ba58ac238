"""What needs PyTorch is refused where it is not installed, and says for what it is needed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import native
from penstock.checkpoint.checkpoint import resolve_path
from penstock.config.engine_config import EngineConfig
from penstock.errors import MissingTorchError
from penstock.fleet.launch import divide
from penstock.runner.machine import detect_machine
from penstock.runner.ranks import join_engine

INSTALL = r": pip install '\.\[torch\]' in Penstock's source folder"


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_is_refused_by_the_engine_and_before_it_starts(device: str) -> None:
    words = f"PyTorch is needed for device '{device}'{INSTALL}$"
    with pytest.raises(MissingTorchError, match=words):
        detect_machine(device)
    with pytest.raises(MissingTorchError, match=words):
        divide(EngineConfig.from_options(device=device), 1)


def test_engines_are_not_divided_among_gpus_that_no_library_uses(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    divided = divide(EngineConfig.from_options(), 2, devices=tmp_path)
    assert [config.model.device for config, _ in divided] == ["auto"] * 2


def test_the_reference_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", "reference")
    with pytest.raises(MissingTorchError, match=f"PENSTOCK_ISA=reference{INSTALL}$"):
        native.library.__wrapped__()
    monkeypatch.delenv("PENSTOCK_ISA")
    monkeypatch.delenv("PENSTOCK_LIBRARY", raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(MissingTorchError, match=f"the reference kernels{INSTALL}; the native ones were not built: "):
        native.library.__wrapped__()


def test_a_rank_on_another_node_is_refused() -> None:
    join: Any = None
    with pytest.raises(MissingTorchError, match=f"an engine on several nodes{INSTALL}$"):
        join_engine(join)


def test_quantize_is_refused(penstock: Any, tmp_path: Path) -> None:
    ended = penstock("quantize", str(resolve_path(None)), str(tmp_path / "out"))
    assert ended.returncode == 2
    assert "error: PyTorch is needed for penstock quantize: pip install" in ended.stderr
