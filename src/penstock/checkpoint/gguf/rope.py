"""Converts the RoPE settings of GGUF files to `config.json` keys."""

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.keys import Keys
from penstock.errors import CheckpointError

if TYPE_CHECKING:  # a header is read before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
IN_CONFIG = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
"""Tensors that hold settings of the model's config, not weights."""


def rope_scaling(
    keys: Keys, tensors: Mapping[str, TensorInfo], config: dict[str, Any], *, stretches: bool
) -> dict[str, Any] | None:
    """`rope_scaling` in the format of `transformers`; Llama 3's is a tensor with a factor for each frequency.

    Args:
        stretches: whether YaRN may also scale the attention scores (`mscale`) in this architecture.
    """
    rotated = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    kind = keys.find("rope.scaling.type", str)
    factor = keys.find("rope.scaling.factor", float) or keys.find("rope.scale_linear", float) or 1.0
    if LONG_FACTORS in tensors:
        return _longrope(keys, tensors, rotated)
    keys.expect("rope.scaling.attn_factor", 1.0)
    if not stretches:
        keys.expect("rope.scaling.yarn_log_multiplier", 0.0)
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", kind, "none, linear and yarn are")
    stretched = kind != "none" and factor != 1.0
    factors = tensors.get(ROPE_FACTORS)
    if factors is not None:
        if stretched:
            raise keys.unsupported("rope.scaling.type", kind, f"not together with the tensor {ROPE_FACTORS}")
        return {"rope_type": "frequency_factors", "frequency_factors": _factors(factors, rotated)}
    if not stretched:
        return None
    if kind == "yarn":
        return _yarn(keys, factor, config)
    return {"rope_type": "linear", "factor": factor}


def _yarn(keys: Keys, factor: float, config: dict[str, Any]) -> dict[str, Any]:
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    keys.expect("rope.scaling.yarn_attn_factor", 1.0)
    original = keys.find("rope.scaling.original_context_length", int) or config["max_position_embeddings"]
    given = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.find("rope.scaling.yarn_beta_fast", float),
        "beta_slow": keys.find("rope.scaling.yarn_beta_slow", float),
    }
    return {key: value for key, value in given.items() if value is not None}


def _longrope(keys: Keys, tensors: Mapping[str, TensorInfo], rotated: int) -> dict[str, Any]:
    if SHORT_FACTORS not in tensors:
        raise CheckpointError(f"{tensors[LONG_FACTORS].file} lacks the tensor {SHORT_FACTORS}")
    given = {
        "rope_type": "longrope",
        "long_factor": _factors(tensors[LONG_FACTORS], rotated),
        "short_factor": _factors(tensors[SHORT_FACTORS], rotated),
        "original_max_position_embeddings": keys.need("rope.scaling.original_context_length", int),
        "attention_factor": keys.find("rope.scaling.attn_factor", float),
    }
    return {key: value for key, value in given.items() if value is not None}


def _factors(info: TensorInfo, rotated: int) -> list[float]:
    what = f"the tensor {info.name} in {info.file}"
    if info.type.name != "F32" or info.shape != (rotated // 2,):
        raise CheckpointError(
            f"{what} must be of type F32 and shape [{rotated // 2}], not {info.type.name} {list(info.shape)}"
        )
    with info.file.open("rb") as file:
        file.seek(info.first)
        content = file.read(info.nbytes)
    factors = list(struct.unpack(f"<{rotated // 2}f", content))
    if not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(f"{what} must hold finite numbers above 0")
    return factors


def with_sections(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE settings with `mrope_section`, the frequencies of each axis of positions, where the file has them."""
    sections = (keys.by_layer("rope.dimension_sections") or [])[:3]
    if len(sections) < 3:
        return {}
    scaling = config.get("rope_scaling")
    name = "rope_parameters" if scaling is None else "rope_scaling"
    return {name: {**(scaling or {}), "mrope_section": sections}}


def interleaved_rows(rows: "NDArray[np.int64]", head_dim: int) -> "NDArray[np.int64]":
    """The indices in a file of rows of queries or keys; the file interleaves the halves of each head."""
    within = rows % head_dim
    return rows - within + within % (head_dim // 2) * 2 + within // (head_dim // 2)
