"""Chooses the table of operations for a device. torch is imported only where it computes."""

import logging
from dataclasses import replace

from penstock import native
from penstock.kernels.ops import Ops, native_ops
from penstock.kernels.quantize.native import QuantizeKernels
from penstock.kernels.ranks import Collective
from penstock.system.allocator import Allocator
from penstock.system.extras import require_torch

log = logging.getLogger(__name__)


def make_ops(
    device: str,
    collective: Collective | None = None,
    *,
    gap: str = "",
    widened_weights: bool = False,
    allocator: Allocator | None = None,
) -> Ops:
    """The fastest available operations for `device`.

    Args:
        collective: of a rank, if there are several.
        gap: an operation of the model without a native kernel, so that the reference computes all of it; empty: none.
        widened_weights: see `reference_ops`; the native kernels multiply weights as they are stored.
        allocator: of host memory; None: the system's.

    Raises:
        MissingTorchError: the reference computes, and torch is not installed.
    """
    library = native.library()
    if library is not None and str(device) == "cpu":
        if not gap:
            return native_ops(library, collective, allocator)
        reason = f"there is no native kernel for {gap}"
        require_torch("this model", reason)
        log.warning("reference kernels, which are slower: %s", reason)
    from penstock.kernels.reference_ops import reference_ops

    ops = reference_ops(collective, widened_weights=widened_weights, allocator=allocator)
    return ops if library is None else replace(ops, quantize=QuantizeKernels(library).quantize)
