"""Marks of tests for what a machine may lack: the native kernels, PyTorch, or NIXL.

Where PyTorch is not installed, tests/conftest.py skips what imports it; `needs_torch` is for tests whose commands do.
"""

from importlib.util import find_spec

import pytest

from penstock import native
from penstock.system.extras import has_torch

LIBRARY = native.library()
needs_native = pytest.mark.skipif(
    LIBRARY is None, reason="the native kernels were not built, or this processor has none"
)
needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="NIXL is not installed; it requires PyTorch")
needs_torch = pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")
