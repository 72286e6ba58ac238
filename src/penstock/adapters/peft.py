"""PEFT's `adapter_config.json`: the linear maps that an adapter modifies, with rank and scale."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint import read_json
from penstock.errors import AdapterError, shown

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256

_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Supported initializations. Others also modify the model, and the folder does not contain how."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": _INITS,
}
"""Supported values of keys that would change the result otherwise; each key may be absent."""
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern",
}  # fmt: skip
_OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout",
    "peft_version",
    "runtime_config", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_core", "megatron_config", "ensure_weight_tying",
}  # fmt: skip
"""Keys that concern training, or how other engines run the adapter."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings that are read from the file.

    Methods and patterns take a module's name in the model, as PEFT writes it.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | tuple[str, ...]
    """A regular expression for whole names, `all-linear`, or a list of names or of their last components."""
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    """Indices of the layers that the adapter modifies; (): all."""
    layers_pattern: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """
        Raises:
            AdapterError: there is no such file, or it asks for what is not supported; the message names the key.
        """
        config = read_json(folder / CONFIG_FILE)
        if config is None:
            raise AdapterError(f"{folder} has no {CONFIG_FILE}, so it is not an adapter saved by PEFT")
        if config.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type is {shown(config.get('peft_type'))}; only LORA is supported")
        _check_neutral(config)
        layers = config.get("layers_to_transform")
        return cls(
            rank=_rank("r", config.get("r", 8)),
            alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
            rslora=_flag("use_rslora", config.get("use_rslora", False)),
            rank_pattern={key: _rank("rank_pattern", value) for key, value in _patterns(config, "rank_pattern")},
            alpha_pattern={key: _number("alpha_pattern", value) for key, value in _patterns(config, "alpha_pattern")},
            targets=_names(config, "target_modules"),
            excluded=_names(config, "exclude_modules"),
            layers=_layers(layers),
            layers_pattern=_pattern_list(config.get("layers_pattern")),
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module's weights."""
        return self.rank_pattern.get(_key_for(module, self.rank_pattern), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on B (A x)."""
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_key_for(module, self.alpha_pattern), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def has(self, module: str) -> bool:
        """Whether the config lists this linear map of a layer."""
        if _is_named(module, self.excluded):
            return False
        if self.targets == "all-linear":
            return True
        found = _is_named(module, self.targets)
        if not found or isinstance(self.targets, str) or not self.layers or module in self.targets:
            return found
        patterns = self.layers_pattern or (r"[^.]*",)
        numbers = (re.match(rf"(?:^|.*?\.)(?:{pattern})\.(\d+)\.", module) for pattern in patterns)
        number = next((found for found in numbers if found), None)
        return number is not None and int(number[1]) in self.layers


def _is_named(module: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


def _key_for(module: str, patterns: Mapping[str, object]) -> str:
    """The first pattern that matches the end of a name; empty if none does."""
    return next((key for key in patterns if re.match(rf"(?:.*\.)?(?:{key})$", module)), "")


def _check_neutral(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in _NEUTRAL:
            allowed: tuple[Any, ...] = (None, *_NEUTRAL[key])
            if value not in allowed:
                raise AdapterError(f"{CONFIG_FILE} has {key}: {shown(value)}, which is not supported")
        elif key not in _READ | _OF_TRAINING and value not in (None, False, [], {}):
            raise AdapterError(f"{CONFIG_FILE} has {key}: {shown(value)}, which is unknown")


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{key} must be a whole number from 1 to {MAX_RANK}, not {shown(value)}")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise AdapterError(f"{key} must be a number, not {shown(value)}")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AdapterError(f"{key} must be true or false, not {shown(value)}")
    return value


def _patterns(config: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{key} must be an object, not {shown(found)}")
    for pattern in found:
        _check_pattern(key, pattern)
    return list(found.items())


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{key} has {shown(pattern)}, which is not a regular expression: {error}") from None


def _names(config: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    found = config.get(key) or ()
    if isinstance(found, str):
        if found != "all-linear":
            _check_pattern(key, found)
        return found
    return _texts(key, found)


def _pattern_list(found: Any) -> tuple[str, ...]:
    patterns = (found,) if isinstance(found, str) and found else _texts("layers_pattern", found or ())
    for pattern in patterns:
        _check_pattern("layers_pattern", pattern)
    return patterns


def _texts(key: str, found: Any) -> tuple[str, ...]:
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) for one in found):
        raise AdapterError(f"{key} must be a text or a list of texts, not {shown(found)}")
    return tuple(found)


def _layers(found: Any) -> tuple[int, ...]:
    listed = [found] if type(found) is int else found or []
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise AdapterError(f"layers_to_transform must be a number or a list of numbers, not {shown(found)}")
    return tuple(listed)
