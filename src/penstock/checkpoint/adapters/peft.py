"""PEFT's `adapter_config.json`: the linear maps that an adapter modifies, with rank and scale."""

import math
import re
import sys
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.checkpoint.adapters.name_pattern import MAX_STATES, NamePattern, starts
from penstock.checkpoint.checkpoint import read_json
from penstock.dataclass import dataclass
from penstock.errors import AdapterError, shown

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
LARGEST_SCALE = 3.4e38
"""About the largest float32."""

MAX_LISTED = 4096
"""Maximum entries of a list of modules or patterns: each module of the model is compared with all of them."""
_LAYER = re.compile(r"\.(\d+)(?=\.)")

T = TypeVar("T")
Names = NamePattern | Literal["all-linear"] | tuple[str, ...]
"""A regular expression for whole names, all linear maps, or a list of names or of their last components."""

_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Supported initializations. Others also modify the base weights, by amounts that the folder does not contain."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False, True),  # of the base weight alone: GPT-2 stores it transposed
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": _INITS,
}
"""Supported values of keys that would change the result otherwise; each key may be absent."""
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "target_parameters", "use_dora", "ensure_weight_tying",
}  # fmt: skip
_OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout",
    "peft_version",
    "runtime_config", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_core", "megatron_config",
}  # fmt: skip
"""Keys that concern only training, or the execution in other engines."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter.

    Methods and patterns take a module's name in the model, as PEFT writes it.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[NamePattern, int]
    alpha_pattern: Mapping[NamePattern, float]
    targets: Names
    excluded: Names
    layers: tuple[int, ...]
    """Indices of the layers that the adapter modifies; (): all."""
    layers_pattern: tuple[NamePattern, ...]
    parameters: tuple[str, ...]
    """Names, or ends of names, of parameters that are not a linear map's weight: those of all experts together."""
    dora: bool
    """Whether the magnitudes of the weights' rows are trained, too (DoRA)."""
    ties: bool
    """Whether an update of the embedding is also one of the output projection."""

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """
        Raises:
            AdapterError: there is no such file, or a setting is not supported; the message names the key.
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
            parameters=_texts("target_parameters", config.get("target_parameters") or ()),
            dora=_flag("use_dora", config.get("use_dora") or False),
            ties=_flag("ensure_weight_tying", config.get("ensure_weight_tying") or False),
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module's weights."""
        return _value_for(module, self.rank_pattern, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on B (A x)."""
        rank = self.rank_of(module)
        alpha = _value_for(module, self.alpha_pattern, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def has(self, module: str) -> bool:
        """Whether the config lists this linear map of a layer."""
        if _is_named(module, self.excluded):
            return False
        if self.targets == "all-linear":
            return True
        found = _is_named(module, self.targets)
        if not found or not isinstance(self.targets, tuple) or not self.layers or module in self.targets:
            return found
        return self._layer_of(module) in self.layers

    def has_parameter(self, name: str) -> bool:
        """Whether `target_parameters` lists this parameter."""
        return _is_named(name, self.parameters)

    def _layer_of(self, module: str) -> int | None:
        """The number after the first components that match `layers_pattern`; without one, after any component."""
        numbers = list(_LAYER.finditer(module))
        if not self.layers_pattern:
            return int(numbers[0][1]) if numbers else None
        for pattern in self.layers_pattern:
            for start in starts(module):
                for number in numbers:
                    if number.start() >= start and pattern.matches(module, start, number.start()):
                        return int(number[1])
        return None


def _is_named(module: str, names: Names) -> bool:
    if isinstance(names, tuple):
        return module in names or any(module.endswith(f".{name}") for name in names)
    return isinstance(names, NamePattern) and names.matches(module)


def _value_for(module: str, patterns: Mapping[NamePattern, T], default: T) -> T:
    """The value of the first pattern that matches the end of a name."""
    return next((value for pattern, value in patterns.items() if pattern.matches_end(module)), default)


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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise AdapterError(f"{key} must be a number, not {shown(value)}")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AdapterError(f"{key} must be true or false, not {shown(value)}")
    return value


def _patterns(config: Mapping[str, Any], key: str) -> list[tuple[NamePattern, Any]]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{key} must be an object, not {shown(found)}")
    _check_count(key, found)
    patterns = [NamePattern(key, text) for text in found]
    num_states = sum(pattern.num_states for pattern in patterns)
    if num_states > MAX_STATES:
        raise AdapterError(f"{key} has expressions of {num_states} characters together; at most {MAX_STATES}")
    return list(zip(patterns, found.values(), strict=True))


def _check_count(key: str, found: Sized) -> None:
    if len(found) > MAX_LISTED:
        raise AdapterError(f"{key} has {len(found)} entries; at most {MAX_LISTED}")


def _names(config: Mapping[str, Any], key: str) -> Names:
    found = config.get(key) or ()
    if isinstance(found, str):
        return "all-linear" if found == "all-linear" else NamePattern(key, found)
    return _texts(key, found)


def _pattern_list(found: Any) -> tuple[NamePattern, ...]:
    texts = (found,) if isinstance(found, str) and found else _texts("layers_pattern", found or ())
    return tuple(pattern for pattern, _ in _patterns({"layers_pattern": dict.fromkeys(texts)}, "layers_pattern"))


def _texts(key: str, found: Any) -> tuple[str, ...]:
    if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
        raise AdapterError(f"{key} must be a text or a list of texts, not {shown(found)}")
    _check_count(key, found)
    return tuple(found)


def _layers(found: Any) -> tuple[int, ...]:
    listed = [found] if type(found) is int else found or []
    if not isinstance(listed, list) or not all(type(index) is int for index in listed):
        raise AdapterError(f"layers_to_transform must be a number or a list of numbers, not {shown(found)}")
    return tuple(listed)
