"""Builds the tier below the prefix cache from the settings."""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.config.settings import Settings
from penstock.core.block_keys import CONTENT_BYTES
from penstock.core.block_tier import BlockTier
from penstock.core.kv_manager import KVManager
from penstock.core.sequence import INT32
from penstock.core.stored_blocks import StoredTree
from penstock.errors import ConfigError
from penstock.kernels.block_bytes import BlockBytes
from penstock.runner.block_file import BlockFile, Layout, open_own, open_temporary
from penstock.runner.block_store import BlockStore, SharedFiles
from penstock.runner.nixl_memory import NixlMemory

logger = logging.getLogger("penstock.engine")


def tier_maker(
    settings: Settings,
    arithmetic: str,
    memory: Sequence[BlockBytes] | None,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[KVManager], BlockTier]:
    """A factory of the tier for `make_scheduler`, where blocks are stored or transferred.

    Args:
        arithmetic: the engine's fingerprint (`runner.fingerprint`).
        memory: the KV cache, by groups; None: the runner does not expose its blocks.

    Raises:
        ConfigError: the file cannot be opened, the runner does not expose its blocks, or NIXL is not installed.
    """
    if memory is None:
        raise ConfigError("this engine's blocks cannot be stored in files: leave out kv_disk and prefill_engines")
    key_bytes = settings.memory.block_size * array(INT32).itemsize
    ranks = settings.tensor_parallel_size
    if ranks > 1:
        arithmetic += f" of {ranks} ranks"  # a block is the concatenation of the ranks' parts
    content_bytes = 0 if settings.images is None else CONTENT_BYTES
    layout = Layout(arithmetic, tuple(group.nbytes for group in memory), key_bytes, content_bytes)
    file, tree = _open(settings, layout)
    transport = SharedFiles(layout) if settings.kv_transfer == "file" else NixlMemory(layout, file)
    store = BlockStore(memory, file, transport)
    return lambda kv: BlockTier(kv, tree, store, clock)


def _open(settings: Settings, layout: Layout) -> tuple[BlockFile | None, StoredTree]:
    wanted = settings.block_file
    if wanted is None:
        return None, StoredTree(0)
    if wanted.path is None:
        try:
            file = open_temporary(layout, wanted.size)
        except OSError as error:
            raise ConfigError(f"a prefill engine needs a temporary file (TMPDIR): {error.strerror}") from error
        return file, StoredTree(file.num_slots)
    file, is_known = open_own(Path(wanted.path), layout, wanted.size)
    tree = StoredTree(file.num_slots, file.records() if is_known else ())
    logger.info("kv_disk %s: %d of %d blocks are in use", wanted.path, len(tree), file.num_slots)
    return file, tree
