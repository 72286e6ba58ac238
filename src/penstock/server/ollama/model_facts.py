"""Details of the served model for `/api/show`, `/api/tags` and `/api/ps`."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.summary import ModelSummary
from penstock.engine.info import EngineInfo
from penstock.server.ollama.schema import ModelDetails

_PARAMETERS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
    "repetition_penalty": "repeat_penalty",
}


def details(summary: ModelSummary, parent: str = "") -> ModelDetails:
    """A model's details; of an adapter, with its model as `parent`."""
    return {
        "parent_model": parent,
        "format": summary.format,
        "family": summary.family,
        "families": [summary.family] if summary.family else [],
        "parameter_size": summary.parameters,
        "quantization_level": summary.quantization,
    }


def model_info(summary: ModelSummary, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Metadata by GGUF's names; `sizes` replace those of the files."""
    family = summary.family or "model"
    sizes = {**summary.sizes, **sizes}
    found: dict[str, Any] = {
        "general.architecture": family,
        "general.name": name,
        **{f"{family}.{name}": value for name, value in sizes.items()},
    }
    if summary.num_parameters is not None:
        found["general.parameter_count"] = summary.num_parameters
    return found


def parameters_text(defaults: SamplingParams, info: EngineInfo) -> str:
    """The defaults of the options, a line each, as in a Modelfile."""
    values = [("num_ctx", str(info.max_model_len))]
    if info.defaults.max_tokens is not None:
        values.append(("num_predict", str(info.defaults.max_tokens)))
    for name, option in _PARAMETERS.items():
        if (value := getattr(defaults, name)) is not None:
            values.append((option, str(value)))
    values += (("stop", json.dumps(text)) for text in info.defaults.stop)
    return "\n".join(f"{name:<30} {value}" for name, value in values)
