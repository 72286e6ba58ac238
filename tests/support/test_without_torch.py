"""Which failed imports skip a test where PyTorch is absent."""

import importlib
import sys

import pytest

from penstock.runner.torch_device import free_gpu_memory
from tests.support.without_torch import missing


def test_a_test_is_skipped_for_its_own_import_and_not_for_one_of_penstocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "penstock.kernels.reference_ops", raising=False)
    with pytest.raises(ModuleNotFoundError) as own:
        import torch  # noqa: F401
    with pytest.raises(ModuleNotFoundError) as of_reference:
        importlib.import_module("penstock.kernels.reference_ops")
    with pytest.raises(ModuleNotFoundError) as of_penstock:
        free_gpu_memory("cuda")
    assert [missing(one.value) for one in (own, of_reference, of_penstock)] == ["torch", "torch", None]
    assert missing(ModuleNotFoundError("no numpy", name="numpy")) is None
