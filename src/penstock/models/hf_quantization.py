"""Reads `quantization_config` of a Hugging Face `config.json`.

Only settings that determine the format of the tensors are read. A matrix in another format than these settings say (a
quantized output projection; in integer formats also an ignored layer) is detected by its tensor names on loading.
"""

import logging
import re
from typing import Any, cast

from penstock.errors import CheckpointError, shown
from penstock.models.hf_config import HFConfig
from penstock.quantization.scheme import (
    HINT,
    Float8Scheme,
    MXFP4Scheme,
    PackedScheme,
    Scheme,
    StoredFormat,
    StoredScheme,
)
from penstock.recipes import PACKED, Recipe
from penstock.weight_formats import FORMATS

logger = logging.getLogger(__name__)

_PATTERN = re.compile(r"\^?(\.\*|\\d\+?|\\\.|[\w.-]|\((\?:)?[\w.|-]+\))*\$?")
"""The supported regular expressions: they match in linear time, so untrusted ones are safe."""
_EXPRESSIONS = r"expressions of names, ., .*, \d+ and (one|other)"
_MOST_IGNORED = 20_000
_MOST_STARS = 4
_MOST_CHOICES = 64
"""Patterns of a recipe in config.json: each matrix is compared with all of them."""
_ROUNDED = tuple(format.name for format in FORMATS.values() if format.has_row_scales)
"""Formats that floating-point weights can be quantized to on loading."""


def read_scheme(config: HFConfig) -> StoredScheme | None:
    """Read the storage format of the layers' matrices; None if they are in the model's dtype.

    Raises:
        CheckpointError: the format is not supported.
    """
    given = config.find("quantization_config", dict)
    if given is None:
        return None
    hint = config.find(HINT, dict)
    if hint is not None:
        return _penstock(config.section(given), config.section(hint))
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "mxfp4": _mxfp4,
    }
    method = config.section(given).need("quant_method", str)
    if method not in readers:
        raise config.unsupported("quant_method of quantization_config", method, tuple(readers))
    return readers[method](config.section(given))


def _gptq(section: HFConfig) -> Scheme:
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("checkpoint_format", "gptq", "gptq_v2")
    section.expect("is_marlin_format", False)
    form = cast(StoredFormat, section.get("checkpoint_format", "gptq"))
    return Scheme(form, _group_size(section), section.get("sym", False))


def _awq(section: HFConfig) -> Scheme:
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("version", "gemm", "GEMM")
    section.expect("zero_point", True)
    return Scheme("awq", _group_size(section))


def _penstock(section: HFConfig, hint: HFConfig) -> PackedScheme:
    """The format that `penstock quantize` writes."""
    section.need("quant_method", str)
    section.expect("quant_method", "compressed-tensors")
    section.expect("format", "pack-quantized")
    hint.need("embeddings", str)
    hint.expect("embeddings", *_ROUNDED)
    layers = hint.need("layers", dict)
    known = all(isinstance(format, str) and format in PACKED for format in layers.values())
    if not known or list(layers)[-1:] != [".*"] or len(layers) > _MOST_CHOICES:
        raise CheckpointError(
            f"{hint.file}: layers of {HINT} must map at most {_MOST_CHOICES} name patterns to "
            f"{' or '.join(PACKED)}, with .* as the last pattern; not {shown(layers)}"
        )
    for pattern in layers:
        if pattern.count("*") > _MOST_STARS or not _PATTERN.fullmatch(pattern):
            raise hint.unsupported(f"the pattern of layers in {HINT}", pattern, (_EXPRESSIONS,))
    return PackedScheme(Recipe(tuple(layers.items())), hint.need("embeddings", str))


def _fp8(section: HFConfig) -> Float8Scheme:
    section.expect("activation_scheme", "dynamic", "static")
    section.expect("fmt", "e4m3", "float8_e4m3fn")
    if not section.has("weight_block_size") and not section.is_null("weight_block_size"):  # AutoFP8's
        kept = "ignored_layers" if section.has("ignored_layers") else "modules_to_not_convert"
        return Float8Scheme("tensor", "weight_scale", _ignored(section, kept))
    block = [Float8Scheme.BLOCK, Float8Scheme.BLOCK]
    section.expect("weight_block_size", block, None)
    ignored = _ignored(section, "modules_to_not_convert")
    per_tensor = section.is_null("weight_block_size")
    return Float8Scheme("tensor" if per_tensor else "block", "weight_scale_inv", ignored)


def _fbgemm_fp8(section: HFConfig) -> Float8Scheme:
    return Float8Scheme("row", "weight_scale", _ignored(section, "modules_to_not_convert"))


def _mxfp4(section: HFConfig) -> MXFP4Scheme:
    return MXFP4Scheme("blocks", _ignored(section, "modules_to_not_convert"))


def _ignored(section: HFConfig, key: str) -> re.Pattern[str] | None:
    """Compile a list of module names (with `*`) and regular expressions (`re:...`) to one pattern of full names.

    Raises:
        CheckpointError: the value is not such a list.
    """
    given = section.find(key, list) or []
    if len(given) > _MOST_IGNORED or not all(isinstance(name, str) and name for name in given):
        raise CheckpointError(f"{key} in {section.file} must be a list of at most {_MOST_IGNORED} names")
    found = []
    for name in dict.fromkeys(given):
        if name.count("*") > _MOST_STARS:
            raise section.unsupported(key, name, (f"names with at most {_MOST_STARS} *",))
        if not name.startswith("re:"):  # matches the module, and everything in it
            parts = ".*".join(map(re.escape, name.split("*")))
            found.append(rf"(.*\.)?{parts}(\..*)?")
        elif _PATTERN.fullmatch(name, 3):
            found.append(f"{name[3:]}.*")
        else:
            raise section.unsupported(key, name, ("names", _EXPRESSIONS))
    return re.compile(rf"(?:{'|'.join(found)})\Z") if found else None


def _compressed_tensors(section: HFConfig) -> StoredScheme:
    section.expect("quantization_status", "compressed", "frozen")
    _set_aside_kv_scheme(section)
    section.expect("transform_config", None, {})
    groups = section.need("config_groups", dict)
    if len(groups) != 1:
        raise CheckpointError(
            f"{section.file}: {len(groups)} config_groups in one checkpoint are not supported, only 1"
        )
    group = section.section(section.section(groups).need(next(iter(groups)), dict))
    group.expect("targets", ["Linear"])
    weights = group.section(group.need("weights", dict))
    weights.expect("dynamic", False)
    weights.expect("actorder", None, "weight", "static")
    section.need("format", str)
    section.expect("format", "int-quantized", "pack-quantized", "float-quantized", "mxfp4-pack-quantized")
    if section.get("format", "") in ("float-quantized", "mxfp4-pack-quantized"):
        return _compressed_floats(section, group, weights)
    weights.expect("type", "int")
    if section.get("format", "") == "pack-quantized":
        weights.expect("num_bits", 4)
        weights.expect("strategy", "group", "channel")
        grouped = weights.get("strategy", "group") == "group"
        return Scheme("pack-quantized", _group_size(weights) if grouped else None, weights.get("symmetric", True))
    weights.expect("num_bits", 8)
    weights.expect("strategy", "channel")
    weights.expect("symmetric", True)
    _check_activations(group)
    return Scheme("int-quantized")


def _compressed_floats(section: HFConfig, group: HFConfig, weights: HFConfig) -> Float8Scheme | MXFP4Scheme:
    weights.expect("type", "float")
    weights.expect("symmetric", True)
    ignored = _ignored(section, "ignore")
    if section.get("format", "") == "mxfp4-pack-quantized":
        weights.expect("num_bits", 4)
        weights.expect("strategy", "group")
        weights.expect("group_size", 32)
        _check_activations(group, 4, "group", type="float")
        return MXFP4Scheme("packed", ignored)
    weights.expect("num_bits", 8)
    weights.need("strategy", str)
    weights.expect("strategy", "tensor", "channel", "block")
    _check_activations(group, 8, "token", "tensor", "group", type="float")
    strategy = weights.get("strategy", "")
    if strategy == "block":
        weights.expect("block_structure", [Float8Scheme.BLOCK, Float8Scheme.BLOCK], "128x128")
        return Float8Scheme("block", "weight_scale", ignored)
    return Float8Scheme("row" if strategy == "channel" else "tensor", "weight_scale", ignored)


def _set_aside_kv_scheme(section: HFConfig) -> None:
    if section.find("kv_cache_scheme", dict) is not None:
        logger.warning("%s: kv_cache_scheme has no effect; --kv-cache-dtype int8 quantizes the cache", section.file)


def _check_activations(group: HFConfig, num_bits: int = 8, *strategies: str, type: str = "int") -> None:
    """Reject activation schemes far from the kernels' own, which round more finely and so use no stored scales."""
    given: dict[str, Any] | None = group.find("input_activations", dict)
    if given is not None:
        activations = group.section(given)
        activations.expect("num_bits", num_bits)
        activations.expect("type", type)
        activations.expect("dynamic", True, False)
        activations.expect("symmetric", True)
        activations.expect("strategy", *(strategies or ("token", "tensor")))


def _group_size(section: HFConfig) -> int | None:
    size = section.need("group_size", int)
    if size == -1:
        return None
    if size < 1:
        raise section.unsupported("group_size", size, ("-1 (whole rows)", "multiples of 32"))
    return size
