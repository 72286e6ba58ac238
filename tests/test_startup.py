"""Memory that is backed while torch is imported."""

import gc
import importlib
import subprocess
import sys

import numpy as np
import pytest

from penstock import native, startup
from penstock.config import EngineConfig
from penstock.runner import machine
from penstock.startup import Reserve

PAGE = 4096


def test_what_is_taken_is_zeroed_begins_a_cache_line_and_is_nobody_elses() -> None:
    reserve = Reserve(3 * PAGE)
    first, second = reserve.take(100), reserve.take(PAGE)
    reserve.stop()
    assert first is not None
    assert second is not None
    assert (first.ctypes.data % 64, second.ctypes.data % 64) == (0, 0)
    assert not first.any()
    first[:] = 1
    assert not second.any()
    second[:] = 2
    assert first.all()


def test_more_than_there_is_cannot_be_taken() -> None:
    reserve = Reserve(PAGE)
    assert reserve.take(PAGE + 1) is None
    assert reserve.take(PAGE) is not None
    assert reserve.take(1) is None
    reserve.stop()


def test_the_rest_goes_back_and_what_was_taken_stays() -> None:
    reserve = Reserve(64 * PAGE)
    taken = reserve.take(PAGE + 1)
    assert taken is not None
    taken[:] = 7
    reserve.stop()
    reserve.give_back_rest()
    assert (taken == 7).all()
    assert reserve.take(1) is None


@pytest.mark.skipif(sys.platform != "linux", reason="by Linux's madvise")
def test_all_of_it_is_backed_if_there_is_time() -> None:
    reserve = Reserve(20 * 2**20)
    reserve._thread.join()
    assert reserve.backed in (20 * 2**20, 0)  # none: a Linux before 5.14
    reserve.stop()


def test_without_a_reserve_the_system_gives_zeros() -> None:
    assert np.array_equal(startup.zeros(10), np.zeros(10, np.uint8))


def test_there_is_none_where_torch_is_imported_already() -> None:
    importlib.import_module("torch")
    with startup.starting(EngineConfig()) as imported:
        assert startup._reserve is None
        assert not gc.isenabled()
        imported()
        assert gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="by Linux's madvise")
def test_what_is_backed_for_the_model_counts_as_free_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Reserve(2**20)
    reserve._thread.join()
    monkeypatch.setattr(startup, "_reserve", reserve)
    assert startup.num_backed() == reserve.backed
    monkeypatch.setattr(machine, "free_memory", lambda: 10**9)
    assert machine.detect_machine("cpu").memory == 10**9 + reserve.backed


def test_garbage_is_collected_again_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), startup.starting(EngineConfig()):
        raise ZeroDivisionError
    assert gc.isenabled()


PROGRAM = """
import sys
from penstock import LLM, SamplingParams, startup
assert "torch" not in sys.modules
startup.physical_cores = lambda: 2
taken = []
take = startup.Reserve.take
startup.Reserve.take = lambda self, size: taken.append(take(self, size)) or taken[-1]
with LLM(device="cpu", quantization="int8", kv_cache_memory="16MiB", threads=1) as llm:
    answer = llm.generate("What is 37 + 58?", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
print(sum(part is not None for part in taken), startup._reserve, len(answer[0].outputs[0].token_ids))
"""


def test_a_models_packed_weights_lie_there() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, reserve, num_tokens = done.stdout.split()
    assert (reserve, num_tokens) == ("None", "4")
    assert (int(taken) > 5) == (native.library() is not None)
