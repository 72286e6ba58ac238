"""Chooses the table of operations for a device. torch is imported only where it computes."""

import logging
from dataclasses import replace

from penstock import native
from penstock.kernels.ops import Ops, native_ops
from penstock.kernels.quantize.native import QuantizeKernels
from penstock.kernels.ranks import Collective
from penstock.native.array import NoNativeKernelError
from penstock.system.allocator import Allocator
from penstock.system.extras import require_torch

log = logging.getLogger(__name__)


def make_ops(
    device: str,
    collective: Collective | None = None,
    *,
    widened_weights: bool = False,
    allocator: Allocator | None = None,
) -> Ops:
    """The fastest available operations for `device`.

    Args:
        collective: of a rank, if there are several.
        widened_weights: see `reference_ops`; the native kernels multiply weights as they are stored.
        allocator: of host memory; None: the system's.
    """
    library = native.library()
    if library is not None and str(device) == "cpu":
        return native_ops(library, collective, allocator)
    ops = _reference_ops(collective, allocator, widened_weights=widened_weights and library is None)
    return ops if library is None else replace(ops, quantize=QuantizeKernels(library).quantize)


def without_native_kernels(ops: Ops, gap: NoNativeKernelError) -> Ops:
    """The reference's table, in place of the native one that lacks an operation.

    Raises:
        MissingTorchError: torch is not installed.
    """
    require_torch("this model", f"there is no native kernel for {gap}")
    log.warning("reference kernels, which are slower: there is no native kernel for %s", gap)
    return _reference_ops(ops.collective, ops.allocator)


def _reference_ops(collective: Collective | None, allocator: Allocator | None, *, widened_weights: bool = False) -> Ops:
    from penstock.kernels.reference_ops import reference_ops

    return reference_ops(collective, widened_weights=widened_weights, allocator=allocator)
