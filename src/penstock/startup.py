"""What a process does while it imports torch: that takes a core a second or two, and leaves the others idle.

One of them backs the memory that packed weights will fill, and what comes first of the KV pool (`reserve`).
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.checkpoint import open_checkpoint
from penstock.config import EngineConfig, SpeculationConfig, resolve
from penstock.errors import PenstockError
from penstock.host import free_memory, physical_cores
from penstock.memory import Machine, MemoryPlan
from penstock.models.registry import read_facts
from penstock.reserve import FIRST_TOKENS, Reserve, opened


@contextmanager
def starting(config: EngineConfig) -> Iterator[Callable[[], None]]:
    """Import torch and load the model within; call what this gives when the first is done and the second begins.

    Until then Python looks for no garbage, of which there is none, and an idle core backs memory for the model if it
    lies here.
    """
    collecting = gc.isenabled()
    reserve = _make_reserve(config) if "torch" not in sys.modules else None

    def imported() -> None:
        if reserve is not None:
            reserve.stop()
        if collecting and not gc.isenabled():
            if not gc.get_freeze_count():  # the application froze nothing itself
                gc.freeze()
                gc.unfreeze()  # to the oldest generation: to scan all as young would take as long again
            gc.enable()

    gc.disable()  # a tenth of the import
    try:
        with opened(reserve):
            yield imported
    finally:
        imported()


def _make_reserve(config: EngineConfig) -> Reserve | None:
    plan = _expected_plan(config) if _on_idle_cores(config.model.device) else None
    if plan is None:
        return None
    first_tokens = min(FIRST_TOKENS, plan.num_tokens) * plan.kv_cache // plan.num_tokens
    to_back = min(plan.weights + first_tokens, free_memory() // 2)
    try:
        return Reserve(2 * plan.weights + plan.kv_cache, to_back)  # more than they take, but of addresses only
    except OSError:
        return None


def _on_idle_cores(device: str) -> bool:
    """Whether the model is for this machine's cores, as far as can be told so early, and one of them is idle."""
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    return sys.platform == "linux" and physical_cores() > 1 and on_cpu


def _expected_plan(config: EngineConfig) -> MemoryPlan | None:
    """The plan that the engine will likely make; None where it will refuse, or has to fetch the model first."""
    model = config.model.model
    if model is not None and not os.path.exists(os.path.expanduser(model)):
        return None
    machine = Machine("cpu", physical_cores(), free_memory(), native=True)
    try:
        facts = read_facts(open_checkpoint(model))
        return resolve(replace(config, speculation=SpeculationConfig()), facts, machine).memory
    except PenstockError:
        return None
