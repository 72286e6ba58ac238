"""Penstock: an inference server for large language models. Requests in, tokens out.

from penstock import LLM, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api.request import RequestOutput
    from penstock.api.sampling_params import SamplingParams, Structured
    from penstock.api.tools import Function, Tools
    from penstock.async_llm import AsyncLLM
    from penstock.llm import LLM

__all__ = ["LLM", "AsyncLLM", "Function", "RequestOutput", "SamplingParams", "Structured", "Tools"]
__version__ = "0.1.0"

_MODULES = {
    "LLM": "penstock.llm",
    "AsyncLLM": "penstock.async_llm",
    "Function": "penstock.api.tools",
    "RequestOutput": "penstock.api.request",
    "SamplingParams": "penstock.api.sampling_params",
    "Structured": "penstock.api.sampling_params",
    "Tools": "penstock.api.tools",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: every process of a server imports this package."""
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names, without those of the implementation."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
