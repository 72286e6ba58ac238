"""Start-up work concurrent with the import of torch, which occupies one core for a second or two.

If the cache has the model's packed weights, their pages are verified. If not, the memory that packed weights will fill,
and the first part of the KV pool, are pre-faulted (`Allocator`).
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.checkpoint.checkpoint import open_model
from penstock.config.engine_config import EngineConfig, SpeculationConfig
from penstock.config.memory import Machine, MemoryPlan
from penstock.config.ranks import Ranks
from penstock.config.settings import Settings, resolve
from penstock.errors import PenstockError
from penstock.models.loading import packed_key
from penstock.models.registry import read_facts
from penstock.system.allocator import FIRST_TOKENS, Allocator, Arena
from penstock.system.host import free_memory, physical_cores, trim_heaps
from penstock.system.packed_cache import PackedFile, PackedFileWriter
from penstock.system.start import Start


@contextmanager
def starting(config: EngineConfig) -> Iterator[Start]:
    """Import torch and load the model with the yielded start within this context; call `imported` between the two.

    Until that call garbage collection is off, and an idle core works for the model if it is a local folder. At the end
    of the context the unused memory is returned.
    """
    collecting = gc.isenabled()
    settings = None if "torch" in sys.modules else _expected_settings(config)
    with ExitStack() as held:
        found, writer = (None, None) if settings is None else _open_packed(config, settings, held)
        allocator = Allocator() if settings is None or found is not None else _pre_faulting(settings.memory, writer)

        def imported() -> None:
            allocator.stop()
            if collecting and not gc.isenabled():
                if not gc.get_freeze_count():  # the application froze nothing itself
                    gc.freeze()
                    gc.unfreeze()  # to the oldest generation: to scan all as young would take as long again
                gc.enable()

        gc.disable()  # a tenth of the import
        try:
            yield Start(allocator, found, writer, imported)
        finally:
            imported()
            allocator.give_back_rest()
            trim_heaps()  # some 15 MiB that imports and loading leave in every engine


def _open_packed(
    config: EngineConfig, settings: Settings, held: ExitStack
) -> tuple[PackedFile | None, PackedFileWriter | None]:
    """The model's cached packed weights, verified while torch is imported; on a miss a writer, which `held` closes,
    unless another process packs them.
    """
    cache = packed_key.packed_cache(settings)
    key = None
    if cache is not None:
        checkpoint, ranks = open_model(config.model), settings.tensor_parallel_size
        key = packed_key.packed_key(checkpoint, settings, Ranks(0, ranks))
    if cache is None or key is None:
        return None, None
    found = cache.open(key)
    if found is not None:
        found.begin_check()
        return found, None
    with ExitStack() as making:
        is_mine = making.enter_context(cache.locked(key, seconds=0))
        words = packed_key.about(checkpoint, settings, Ranks(0, ranks))
        writer = cache.begin(key, settings.memory.weights, words) if is_mine else None
        if writer is not None:
            making.callback(writer.close)
            held.push(making.pop_all())
        return None, writer


def _pre_faulting(plan: MemoryPlan, writer: PackedFileWriter | None) -> Allocator:
    """An allocator that pre-faults the memory of packed weights, in the writer's file if there is one, and the first
    part of the KV pool.

    Only for weights that will be packed: otherwise it delays the import of torch by more than it saves
    (docs/architecture.md, "Design decisions").
    """
    first_tokens = min(FIRST_TOKENS, plan.num_tokens) * plan.kv_cache // plan.num_tokens
    weights = plan.weights if writer is None else 0
    to_back = min(weights + first_tokens, free_memory() // 2)
    try:
        arena = Arena(2 * plan.weights + plan.kv_cache, to_back)  # more than they take, but of addresses only
    except OSError:
        return Allocator()
    return Allocator(arena, None if writer is None else writer.arena)


def _on_idle_cores(device: str) -> bool:
    """Whether the model will run on the CPU, as far as known before torch is imported, with a core to spare."""
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    return sys.platform == "linux" and physical_cores() > 1 and on_cpu


def _expected_settings(config: EngineConfig) -> Settings | None:
    """The settings that the engine will probably have.

    None if it will refuse them, must download the model first, or leaves no core idle during the import.
    """
    model = config.model.model
    if not _on_idle_cores(config.model.device):
        return None
    if model is not None and not os.path.exists(os.path.expanduser(model)):
        return None
    machine = Machine("cpu", physical_cores(), free_memory(), native=True)
    try:
        checkpoint = open_model(config.model)
        facts = read_facts(checkpoint, ranks=config.model.tensor_parallel_size)
        return resolve(replace(config, speculation=SpeculationConfig()), facts, machine)
    except PenstockError:
        return None
