"""Penstock: an inference server for large language models. Requests in, tokens out.

from penstock import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

from penstock.api.request import RequestOutput
from penstock.api.sampling_params import SamplingParams, Structured
from penstock.api.tools import Function, Tools

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.llm import LLM

__all__ = ["LLM", "AsyncLLM", "Function", "RequestOutput", "SamplingParams", "Structured", "Tools"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`LLM` and `AsyncLLM` are imported when they are first used, as `import penstock` should take no time."""
    if name == "LLM":
        from penstock.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from penstock.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without those of the implementation."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
