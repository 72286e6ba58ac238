"""The memory plan in a line."""

from dataclasses import replace
from pathlib import Path

from penstock.config.byte_counts import GIB, MIB
from penstock.config.memory import LayerGroup, MemoryPlan
from penstock.engine.memory_line import disk_part, memory_line
from penstock.system.weight_cache import WeightCache

PLAN = MemoryPlan(96_574_873, 8 * GIB, 70_000_000, (LayerGroup((0,), None, 11_650),), 32, "--kv-cache-memory")


def test_the_cache_of_a_model_on_a_cpu_is_filled_on_demand_and_that_of_a_gpu_at_once() -> None:
    room = "room for 372,800 tokens"
    assert memory_line(PLAN) == (
        f"Memory: 92.1 MiB weights + up to 8 GiB KV cache ({room}, filled on demand; --kv-cache-memory) + 66.8 MiB "
        "workspace"
    )
    assert f"+ 8 GiB KV cache ({room}; --kv-cache-memory)" in memory_line(PLAN, device="cuda:0")


def test_adapters_a_draft_model_and_ranks_are_told() -> None:
    line = memory_line(replace(PLAN, adapters=16 * MIB, draft=replace(PLAN, weights=5 * MIB)), ranks=2)
    assert line.startswith("Memory of each of 2 ranks: 92.1 MiB weights + 16 MiB adapters + up to")
    assert "workspace; draft model: 5 MiB weights + up to 8 GiB KV cache" in line


def test_an_encoder_has_no_cache() -> None:
    groups = (LayerGroup((0,), None, 32),)
    plan = MemoryPlan(90 * MIB, 12 * MIB, 30 * MIB, groups, 32, is_cache=False)
    assert memory_line(plan) == (
        "Memory: 90 MiB weights + 12 MiB for the keys of a step (up to 1,024 tokens; nothing is cached) + 30 MiB "
        "workspace"
    )


def test_packed_weights_on_disk_are_told_where_there_are_some(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "packed")
    assert disk_part(None) == disk_part(cache) == ""
    (tmp_path / "packed").mkdir()
    assert disk_part(cache) == ""
    (tmp_path / "packed" / "0a.packed").write_bytes(bytes(3 * MIB))
    assert disk_part(cache).startswith("; on disk 3 MiB of packed weights, of at most ")
