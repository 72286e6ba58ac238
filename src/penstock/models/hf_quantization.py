"""Reading `quantization_config` of a Hugging Face `config.json`.

Only what decides how the tensors are to be read is read: a matrix that is not stored as this says (an ignored layer, a
quantized output projection) is found by its name when the weights are loaded.
"""

from typing import cast

from penstock.errors import CheckpointError, shown
from penstock.models.hf_config import HFConfig
from penstock.quantization.scheme import HINT, PackedScheme, Scheme, StoredFormat
from penstock.recipes import PACKED, Recipe
from penstock.weight_formats import FORMATS


def read_scheme(config: HFConfig) -> Scheme | PackedScheme | None:
    """How the layers' matrices are stored; None: as floating point.

    Raises:
        CheckpointError: in a way that we do not read, which the message names.
    """
    given = config.find("quantization_config", dict)
    if given is None:
        return None
    hint = config.find(HINT, dict)
    if hint is not None:
        return _penstock(config.section(given), config.section(hint))
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
    method = config.section(given).need("quant_method", str)
    if method not in readers:
        raise config.unsupported("quant_method of quantization_config", method, tuple(readers))
    return readers[method](config.section(given))


def _gptq(section: HFConfig) -> Scheme:
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("checkpoint_format", "gptq", "gptq_v2")
    section.expect("is_marlin_format", False)
    return Scheme(cast(StoredFormat, section.get("checkpoint_format", "gptq")), _group_size(section))


def _awq(section: HFConfig) -> Scheme:
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("version", "gemm", "GEMM")
    section.expect("zero_point", True)
    return Scheme("awq", _group_size(section))


def _penstock(section: HFConfig, hint: HFConfig) -> PackedScheme:
    """What `penstock quantize` wrote."""
    section.need("quant_method", str)
    section.expect("quant_method", "compressed-tensors")
    section.expect("format", "pack-quantized")
    hint.need("embeddings", str)
    hint.expect("embeddings", *FORMATS)
    layers = hint.need("layers", dict)
    if list(layers)[-1:] != [".*"] or not all(format in PACKED for format in layers.values()):
        raise CheckpointError(
            f"{hint.file}: layers of {HINT} must be patterns of names with {' or '.join(PACKED)} each, the last one "
            f".*; not {shown(layers)}"
        )
    return PackedScheme(Recipe(tuple(layers.items())), hint.need("embeddings", str))


def _compressed_tensors(section: HFConfig) -> Scheme:
    section.expect("quantization_status", "compressed")
    section.expect("transform_config", None, {})
    groups = section.need("config_groups", dict)
    if len(groups) != 1:
        raise CheckpointError(
            f"{section.file}: {len(groups)} config_groups in one checkpoint are not supported, only 1"
        )
    group = section.section(section.section(groups).need(next(iter(groups)), dict))
    group.expect("targets", ["Linear"])
    weights = group.section(group.need("weights", dict))
    weights.expect("type", "int")
    weights.expect("dynamic", False)
    weights.expect("actorder", None, "weight", "static")
    section.need("format", str)
    section.expect("format", "int-quantized", "pack-quantized")
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


def _check_activations(group: HFConfig) -> None:
    """Activations are rounded to 8 bits for each token anyway; other ways to do so are refused."""
    given = group.find("input_activations", dict)
    if given is not None:
        activations = group.section(given)
        activations.expect("num_bits", 8)
        activations.expect("type", "int")
        activations.expect("dynamic", True)
        activations.expect("symmetric", True)
        activations.expect("strategy", "token")


def _group_size(section: HFConfig) -> int | None:
    size = section.need("group_size", int)
    if size == -1:
        return None
    if size < 1:
        raise section.unsupported("group_size", size, ("-1, for whole rows", "128 and its multiples"))
    return size
