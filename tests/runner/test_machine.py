import os

import pytest
import torch

from penstock.errors import ConfigError
from penstock.runner.machine import detect_machine


def test_this_machine_has_cores_and_memory() -> None:
    machine = detect_machine("cpu")
    assert machine.device == "cpu"
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.memory > 2**20


def test_auto_is_a_gpu_where_there_is_one() -> None:
    assert detect_machine("auto").device == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "cuda:x", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"no device '{device}'; available: cpu"):
        detect_machine(device)
