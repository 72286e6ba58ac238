"""The tables of operations that this machine can have, for tests that hold every version to the same."""

import pytest

from penstock.kernels.ops import Ops, native_ops
from penstock.kernels.reference_ops import over_tensors, reference_ops
from tests.support.needs import LIBRARY, needs_native

REFERENCE = reference_ops()
VERSIONS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(over_tensors(native_ops(LIBRARY)) if LIBRARY else REFERENCE, id="native", marks=needs_native),
]


def recording_table() -> Ops:
    """The native versions on their own arrays, which can be recorded; as `native_table`."""
    assert LIBRARY is not None
    return native_ops(LIBRARY)


def native_table() -> Ops:
    """The native versions, on tensors, for a test that is skipped where there are none."""
    assert LIBRARY is not None
    return over_tensors(native_ops(LIBRARY))
