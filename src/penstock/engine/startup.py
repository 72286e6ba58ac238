"""Start-up work beside the import of the engine's modules, which takes one core for 0.1 s, or with torch a second.

If the cache has the model's packed weights, their pages are verified meanwhile.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.checkpoint.checkpoint import open_model
from penstock.config.engine_config import EngineConfig, SpeculationConfig
from penstock.config.machine import Machine
from penstock.config.ranks import Ranks
from penstock.config.settings import Settings, resolve
from penstock.errors import PenstockError
from penstock.models.loading import packed_key
from penstock.models.registry import read_facts
from penstock.system.host import free_memory, importing, physical_cores, trim_heaps
from penstock.system.packed_file import PackedFile
from penstock.system.start import Start

_LAST_IMPORTED = "penstock.engine.build"
"""The module whose import brings all others of an engine."""


@contextmanager
def starting(config: EngineConfig) -> Iterator[Start]:
    """Import the engine's modules and load the model with the yielded start within this context.

    Meanwhile garbage is not collected: there is next to none, and a vocabulary alone makes 100,000 objects. At the end
    the heap's unused memory is returned.
    """
    with importing():
        try:
            yield Start(found=None if _LAST_IMPORTED in sys.modules else _find_packed(config))
        finally:
            trim_heaps()  # some 15 MiB that imports and loading leave in every engine


def _find_packed(config: EngineConfig) -> PackedFile | None:
    """The model's cached packed weights, if there are any; a thread has begun to verify them."""
    settings = _expected_settings(config)
    cache = None if settings is None else packed_key.packed_cache(settings)
    if settings is None or cache is None:
        return None
    key = packed_key.packed_key(open_model(config.model), settings, Ranks(0, settings.tensor_parallel_size))
    packed = None if key is None else cache.open(key)
    if packed is not None:
        packed.begin_check()
    return packed


def _expected_settings(config: EngineConfig) -> Settings | None:
    """The settings that the engine will probably have.

    None if it will refuse them, must download the model first, seems to run on a GPU, or has another backend.
    """
    device, model = config.model.device, config.model.model
    if config.model.backend != "penstock":
        return None
    if device != "cpu" and (device != "auto" or Path("/dev/nvidiactl").exists()):
        return None
    if model is not None and not os.path.exists(os.path.expanduser(model)):
        return None
    machine = Machine("cpu", physical_cores(), free_memory(), native=True)
    try:
        checkpoint = open_model(config.model)
        facts = read_facts(checkpoint, ranks=config.model.tensor_parallel_size)
        # Drafts change no weights of the model; their own files are opened where they are loaded.
        return resolve(replace(config, speculation=SpeculationConfig()), facts, machine)
    # The engine's own start raises it again, with a message for the user.
    except PenstockError:
        return None
