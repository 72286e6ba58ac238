"""Memory that is backed while torch is imported."""

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import native
from penstock.config.engine_config import EngineConfig
from penstock.engine import build, startup
from penstock.engine.build import build_engine
from penstock.system.allocator import Allocator, Arena
from penstock.system.start import Start


def test_there_is_none_where_torch_is_imported_already() -> None:
    importlib.import_module("torch")
    with startup.starting(EngineConfig()) as start:
        assert start.allocator.num_backed == 0
        assert not gc.isenabled()
        start.imported()
        assert gc.isenabled()


def test_garbage_is_collected_again_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), startup.starting(EngineConfig()):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_unused_memory_is_returned_after_a_failure(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    config = EngineConfig.from_options(model=str(tiny_llama), kv_cache_memory="4MiB", packed_cache="off", device="cpu")
    monkeypatch.setattr(startup, "physical_cores", lambda: 2)
    monkeypatch.delitem(sys.modules, "torch")
    found = []

    def fail() -> None:
        with startup.starting(config) as start:
            found.append((start.allocator, start.allocator._arena is not None))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    ((allocator, had_arena),) = found
    assert had_arena
    assert allocator._arena is None


def test_memory_that_is_pre_faulted_for_the_model_counts_as_free_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_memory", lambda: 10**9)
    allocator = Allocator(Arena(2**20, 2**20))
    assert allocator._thread is not None
    allocator._thread.join()
    config = EngineConfig.from_options(device="cpu")
    assert build._detect_machine(config, Start(allocator)).memory == 10**9 + 2**20
    assert build._detect_machine(config, Start()).memory == 10**9


def test_engines_of_one_process_take_nothing_from_one_anothers_allocator(tiny_llama: Path) -> None:
    options = {"kv_cache_memory": "4MiB", "packed_cache": "off", "device": "cpu", "threads": 1}
    config = EngineConfig.from_options(model=str(tiny_llama), **options)
    arenas = [Arena(64 * 2**20, 0) for _ in range(2)]
    taken = []
    engines = []
    for start in (*(Start(Allocator(arena)) for arena in arenas), None):
        engines.append(build_engine(config, start=start))
        taken.append([arena._taken for arena in arenas])
    (first, none), (still_first, second), last = taken
    assert first == still_first > 3 * 2**20
    assert none == 0
    assert second == first
    assert last == [first, second]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_imported_counts_as_old_and_what_was_frozen_stays_so(frozen: bool) -> None:
    gc.collect()
    if frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        with startup.starting(EngineConfig()) as start:
            new = [[number] for number in range(1000)]
            start.imported()
            assert count - 100 < gc.get_freeze_count() <= count  # a frozen object may be freed
            young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
            assert frozen or not young.intersection(map(id, new))
    finally:
        gc.unfreeze()


def test_the_plan_is_that_of_a_model_in_a_folder(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_llama.parent))
    monkeypatch.setattr(startup, "physical_cores", lambda: 2)
    expected = startup._expected_settings
    found = expected(EngineConfig.from_options(model=f"~/{tiny_llama.name}", kv_cache_memory="4MiB"))
    assert found is not None
    assert found.memory.kv_cache <= 4 * 2**20
    assert expected(EngineConfig.from_options(model="nobody/has-this")) is None
    assert expected(EngineConfig.from_options(model=str(tiny_llama), max_model_len=10**9)) is None


PROGRAM = """
import sys
from penstock import LLM, SamplingParams
from penstock.engine import startup
assert "torch" not in sys.modules
startup.physical_cores = lambda: 2
taken, given = [], []
take, give_back_rest = startup.Arena.take, startup.Allocator.give_back_rest
startup.Arena.take = lambda self, size: taken.append(take(self, size)) or taken[-1]
startup.Allocator.give_back_rest = lambda self: given.append(self) or give_back_rest(self)
with LLM(device="cpu", quantization="int8", kv_cache_memory="16MiB", threads=1) as llm:
    answer = llm.generate("What is 37 + 58?", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
assert given[0].num_backed == 0 and len(given) == 1 and len(answer[0].outputs[0].token_ids) == 4
print(all(part is not None for part in taken), len(taken), max(map(len, taken)) > 15 * 2**20)
"""


def test_a_models_packed_weights_and_its_pool_lie_there() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    there, parts, has_pool = done.stdout.split()
    if native.library() is not None:
        assert (there, has_pool) == ("True", "True")
        assert int(parts) > 5
