"""Reads `quantization_config` of a Hugging Face `config.json`, or ModelOpt's `hf_quant_config.json`.

Only settings that determine the format of the tensors are read; what is in other ones is logged. A matrix in another
format than these settings say (such as a quantized output projection) is detected by its tensor names on loading.
"""

import logging
from typing import Any, cast

from penstock.checkpoint.checkpoint import read_json
from penstock.config.recipes import PACKED, Recipe
from penstock.config.weight_formats import FORMATS
from penstock.errors import CheckpointError, shown
from penstock.models.hf_config import HFConfig
from penstock.models.loading.module_names import EXPRESSIONS, MOST_STARS, is_expression, module_pattern
from penstock.quantization.scheme import (
    HINT,
    Float8Scheme,
    MXFP4Scheme,
    PackedScheme,
    QuantizedModules,
    Scheme,
    StoredFormat,
    StoredScheme,
)

logger = logging.getLogger(__name__)

_KEYS = ("quantization_config", "compression_config")
"""The second one is compressed-tensors' older name."""
_MODELOPT_FILE = "hf_quant_config.json"
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""What AutoGPTQ, GPTQModel and AutoAWQ do not quantize, whether they list it or not."""
_OF_ACTIVATIONS = "act_"
"""Begin of AutoRound's settings of activations, which are not rounded here."""
_MOST_CHOICES = 64
"""Patterns of a recipe in config.json: each matrix is compared with all of them."""
_ROUNDED = tuple(one.name for one in FORMATS.values() if one.has_row_scales and one.scale == "uint8")
"""Formats that floating-point weights can be quantized to on loading."""
_ABOUT_QUANTIZING = (
    *("quant_method", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "desc_act", "dataset"),
    *("tokenizer", "quantizer", "meta", "model_seqlen", "batch_size", "pad_token_id", "use_exllama", "exllama_config"),
    *("max_input_length", "cache_block_outputs", "use_cuda_fp16", "disable_exllama", "backend", "format", "hyb_act"),
    *("module_name_preceding_first_block", "pack_dtype", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "version"),
    *("global_compression_ratio", "dequantize", "activation_scale_ub", "model_name_or_path", "model_file_base_name"),
    *("kv_cache_quant_method", "producer", "use_mse_search", "act_group_aware", "mock_quantization", "offload_to_disk"),
)
"""Settings of how it was quantized, or of how other engines run it."""


def read_scheme(config: HFConfig) -> StoredScheme | None:
    """Read the storage format of the layers' matrices; None if they are in the model's dtype.

    Raises:
        CheckpointError: the format is not supported.
    """
    section = _section(config)
    if section is None:
        return None
    section.ignore(*_ABOUT_QUANTIZING)
    hint = config.find(HINT, dict)
    if hint is not None:
        return _penstock(section, config.section(hint))
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "modelopt": _modelopt,
        "mxfp4": _mxfp4,
    }
    method = section.need("quant_method", str)
    if method not in readers:
        raise config.unsupported("quant_method of quantization_config", method, tuple(readers))
    return readers[method](section)


def _section(config: HFConfig) -> HFConfig | None:
    for key in _KEYS:
        if (given := config.find(key, dict)) is not None:
            return config.section(given, key)
    text = config.read_section("text_config")
    if text is not None and (given := text.find(_KEYS[0], dict)) is not None:
        return config.section(given, f"text_config.{_KEYS[0]}")
    found = read_json(config.file.with_name(_MODELOPT_FILE)) or {}
    given = config.section(found).find("quantization", dict) or {}
    if given.get("quant_algo") is None:
        return None
    return config.section({"quant_method": "modelopt"} | given, _MODELOPT_FILE)


def _gptq(section: HFConfig) -> Scheme:
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("checkpoint_format", "gptq", "gptq_v2")
    section.expect("is_marlin_format", False, None)
    section.expect("lm_head", False, None)
    within = section.find("modules_in_block_to_quantize", list)
    targets = None if within is None else module_pattern(section, "modules_in_block_to_quantize", _flat(within))
    ignored = [*_ROUTERS, *_excluded(section, "dynamic")]
    modules = QuantizedModules(targets, module_pattern(section, "dynamic", ignored))
    form = cast(StoredFormat, section.get("checkpoint_format", "gptq"))
    return Scheme(form, _group_size(section), section.get("sym", False), modules=modules)


def _flat(names: list[Any]) -> list[Any]:
    return [part for name in names for part in (name if isinstance(name, list) else [name])]


def _excluded(section: HFConfig, key: str) -> list[str]:
    """The modules that GPTQModel's `dynamic` excludes, by expressions after `-:`."""
    found = []
    for name, settings in (section.find(key, dict) or {}).items():
        if name.startswith("-:"):
            found.append(f"re:{name[2:]}")
        elif settings:
            raise section.unsupported(key, name, ("-: and an expression, which excludes layers",))
    return found


def _awq(section: HFConfig) -> Scheme:
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("version", "gemm", "GEMM")
    section.expect("zero_point", True)
    listed = section.find("modules_to_not_convert", list) or []
    ignored = module_pattern(section, "modules_to_not_convert", [*_ROUTERS, *listed])
    return Scheme("awq", _group_size(section), modules=QuantizedModules(None, ignored))


def _auto_round(section: HFConfig) -> Scheme:
    """Intel's AutoRound: GPTQ's or AWQ's tensors, also of routers; `auto_round` alone stores zero points themselves."""
    forms = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round": "gptq_v2"}
    forms |= {"auto_round:auto_awq": "awq", "auto_round:awq": "awq"}
    section.expect("packing_format", *forms)
    section.need("bits", int)
    section.expect("bits", 4)
    section.expect("data_type", "int")
    section.expect("super_bits", None)
    section.expect("rotation_config", None, {})
    symmetric = section.get("sym", True)
    form = cast(StoredFormat, forms[section.get("packing_format", "auto_round:auto_gptq")])
    blocks = section.find("block_name_to_quantize", str)
    targets = None if not blocks else module_pattern(section, "block_name_to_quantize", blocks.split(","))
    listed = section.find("modules_to_not_convert", list) or []
    ignored = module_pattern(section, "extra_config", [*listed, *_float_layers(section)])
    section.ignore(*(key for key in section.keys if key.startswith((_OF_ACTIVATIONS, "enable_"))))
    section.ignore("autoround_version", "iters", "seqlen", "nsamples", "lr", "minmax_lr", "low_gpu_mem_usage")
    section.ignore("gradient_accumulate_steps", "amp", "to_quant_block_names", "scale_dtype", "super_group_size")
    return Scheme(form, _group_size(section), symmetric, modules=QuantizedModules(targets, ignored))


def _float_layers(section: HFConfig) -> list[str]:
    """The layers that AutoRound's `extra_config` leaves in floating point."""
    found = []
    for name, given in (section.find("extra_config", dict) or {}).items():
        if not isinstance(given, dict):
            raise section.unsupported(f"extra_config of {shown(name)}", given, ({"bits": 16},))
        settings = {key: value for key, value in given.items() if not key.startswith(_OF_ACTIVATIONS)}
        if settings.get("bits", 0) in (16, 32):
            found.append(name if "*" not in name else f"re:{name}")
        elif any(value not in (None, section.find(key, type(value))) for key, value in settings.items()):
            raise section.unsupported(f"extra_config of {shown(name)}", given, ({"bits": 16},))
    return found


def _penstock(section: HFConfig, hint: HFConfig) -> PackedScheme:
    """The format that `penstock quantize` writes."""
    section.need("quant_method", str)
    section.expect("quant_method", "compressed-tensors")
    section.expect("format", "pack-quantized")
    section.ignore("config_groups", "ignore", "quantization_status", "kv_cache_scheme")
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
        if pattern.count("*") > MOST_STARS or not is_expression(pattern):
            raise hint.unsupported(f"the pattern of layers in {HINT}", pattern, (EXPRESSIONS,))
    return PackedScheme(Recipe(tuple(layers.items())), hint.need("embeddings", str))


def _fp8(section: HFConfig) -> Float8Scheme:
    section.expect("activation_scheme", "dynamic", "static")
    section.expect("fmt", "e4m3", "float8_e4m3fn")
    if not section.has("weight_block_size") and not section.is_null("weight_block_size"):  # AutoFP8's
        kept = "ignored_layers" if section.has("ignored_layers") else "modules_to_not_convert"
        return Float8Scheme("tensor", "weight_scale", _all_but(section, kept))
    block = [Float8Scheme.BLOCK, Float8Scheme.BLOCK]
    section.expect("weight_block_size", block, None)
    per_tensor = section.is_null("weight_block_size")
    modules = _all_but(section, "modules_to_not_convert")
    return Float8Scheme("tensor" if per_tensor else "block", "weight_scale_inv", modules)


def _fbgemm_fp8(section: HFConfig) -> Float8Scheme:
    return Float8Scheme("row", "weight_scale", _all_but(section, "modules_to_not_convert"))


def _modelopt(section: HFConfig) -> Float8Scheme:
    """NVIDIA's ModelOpt: FP8 with a scale per tensor."""
    if (within := section.find("quantization", dict)) is not None:
        section = section.section(within, "quantization")
    section.need("quant_algo", str)
    section.expect("quant_algo", "FP8", "fp8")
    if section.find("kv_cache_quant_algo", str) is not None:
        _set_kv_scheme_aside(section, "kv_cache_quant_algo")
    _set_kv_scheme_aside(section, "kv_cache_scheme")
    section.ignore("config_groups")  # what FP8 means
    listed = "exclude_modules" if section.has("exclude_modules") else "ignore"
    return Float8Scheme("tensor", "weight_scale", _all_but(section, listed))


def _mxfp4(section: HFConfig) -> MXFP4Scheme:
    return MXFP4Scheme("blocks", _all_but(section, "modules_to_not_convert"))


def _all_but(section: HFConfig, key: str) -> QuantizedModules:
    """All linear maps but those that a key lists."""
    return QuantizedModules(None, module_pattern(section, key, section.find(key, list) or []))


def _compressed_tensors(section: HFConfig) -> StoredScheme:
    section.expect("quantization_status", "compressed", "frozen")
    _set_kv_scheme_aside(section, "kv_cache_scheme")
    section.expect("transform_config", None, {})
    if (sparsity := section.find("sparsity_config", dict)) is not None:
        section.section(sparsity).expect("format", "dense")
    groups = section.need("config_groups", dict)
    if len(groups) != 1:
        raise CheckpointError(
            f"{section.file}: {len(groups)} config_groups in one checkpoint are not supported, only 1"
        )
    group = section.section(section.section(groups).need(next(iter(groups)), dict))
    weights = group.section(group.need("weights", dict))
    weights.expect("dynamic", False)
    weights.expect("actorder", None, "weight", "static")
    modules = _modules(section, group)
    floats = ("float-quantized", "mxfp4-pack-quantized")
    section.need("format", str)
    section.expect("format", "int-quantized", "pack-quantized", "naive-quantized", *floats)
    form = section.get("format", "")
    if form in floats or (form == "naive-quantized" and weights.get("type", "int") == "float"):
        return _compressed_floats(form, group, weights, modules)
    weights.expect("type", "int")
    if form == "pack-quantized":
        weights.expect("num_bits", 4)
        weights.expect("strategy", "group", "channel")
        grouped = weights.get("strategy", "group") == "group"
        size, symmetric = _group_size(weights) if grouped else None, weights.get("symmetric", True)
        return Scheme("pack-quantized", size, symmetric, modules=modules)
    weights.expect("num_bits", 8)
    weights.need("strategy", str)
    weights.expect("strategy", "channel", "tensor")
    weights.expect("symmetric", True)
    _check_activations(group)
    return Scheme("int-quantized", per_tensor=weights.get("strategy", "") == "tensor", modules=modules)


def _modules(section: HFConfig, group: HFConfig) -> QuantizedModules:
    """Those of a group of layers: of all linear ones, or by names and expressions."""
    targets = group.find("targets", list) or ["Linear"]
    for target in targets:
        if isinstance(target, str) and target != "Linear" and target.isidentifier() and target[0].isupper():
            raise group.unsupported("targets", target, ("Linear", "names of linear layers", EXPRESSIONS))
    found = None if "Linear" in targets else module_pattern(group, "targets", targets, parts=False)
    return QuantizedModules(found, module_pattern(section, "ignore", section.find("ignore", list) or []))


def _compressed_floats(
    form: str, group: HFConfig, weights: HFConfig, modules: QuantizedModules
) -> Float8Scheme | MXFP4Scheme:
    weights.expect("type", "float")
    weights.expect("symmetric", True)
    if form == "mxfp4-pack-quantized":
        weights.expect("num_bits", 4)
        weights.expect("strategy", "group")
        weights.expect("group_size", 32)
        _check_activations(group, 4, "group", type="float")
        return MXFP4Scheme("packed", modules)
    weights.expect("num_bits", 8)
    weights.need("strategy", str)
    weights.expect("strategy", "tensor", "channel", "block")
    _check_activations(group, 8, "token", "tensor", "group", type="float")
    strategy = weights.get("strategy", "")
    if strategy == "block":
        weights.expect("block_structure", [Float8Scheme.BLOCK, Float8Scheme.BLOCK], "128x128")
        return Float8Scheme("block", "weight_scale", modules)
    return Float8Scheme("row" if strategy == "channel" else "tensor", "weight_scale", modules)


def _set_kv_scheme_aside(section: HFConfig, key: str) -> None:
    if section.has(key):
        section.ignore(key)
        logger.warning("%s: %s has no effect; --kv-cache-dtype int8 quantizes the cache", section.file, key)


def _check_activations(group: HFConfig, num_bits: int = 8, *strategies: str, type: str = "int") -> None:
    """Reject activation schemes far from the kernels' own, which round more finely and so use no stored scales."""
    given: dict[str, Any] | None = group.find("input_activations", dict)
    if given is not None:
        activations = group.section(given)
        activations.expect("num_bits", num_bits)
        activations.expect("type", type)
        activations.expect("dynamic", True, False)
        activations.expect("symmetric", True, False)
        activations.expect("strategy", *(strategies or ("token", "tensor")))


def _group_size(section: HFConfig) -> int | None:
    size = section.need("group_size", int)
    if size == -1:
        return None
    if size < 1:
        raise section.unsupported("group_size", size, ("-1 (whole rows)", "multiples of 32"))
    return size
