"""Penstock: an inference server for large language models. Requests in, tokens out.

from penstock import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

from penstock.parsers.tools import Function, Tools
from penstock.request import RequestOutput
from penstock.sampling_params import SamplingParams, Structured

if TYPE_CHECKING:
    from penstock.llm import LLM

__all__ = ["LLM", "Function", "RequestOutput", "SamplingParams", "Structured", "Tools"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`LLM` is imported when it is first used, as `import penstock` should take no time."""
    if name == "LLM":
        from penstock.llm import LLM

        return LLM
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
