"""Strict reading of a Hugging Face `config.json`.

Every key is either read by a family, known to have no effect on inference, or reported: a setting that is not
implemented must not be ignored silently.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.model_facts import BYTES_OF, DType
from penstock.errors import CheckpointError, shown
from penstock.layers.rope import RopeConfig, RopeType
from penstock.models.hf_keys import LARGEST, WITHOUT_EFFECT

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),  # as Qwen2-VL's repositories name what `mrope_section` makes of the default
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor"),
    "frequency_factors": ("frequency_factors",),
    "proportional": ("factor",),
}
_WITHOUT_NEEDS = {"proportional"}
"""RoPE types without a required setting; the other types require the first setting in `_ROPE_TYPES`."""
_ROPE_COMMON = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("mrope_section", "mrope_interleaved"),  # in text, all axes of a position are equal
}
_KEPT_BY_SCALING = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
"""Settings of `rope_parameters` that do not belong to the scaling of the context."""
_MAY_BE_ZERO = {"mscale", "mscale_all_dim"}

_IN_JSON = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class HFConfig:
    """A `config.json` with type-checked access, which records the keys that have been read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.file = checkpoint.config_file
        self._checkpoint = checkpoint
        self._values = checkpoint.config
        self._read: set[str] = set()
        self._sections: list[tuple[str, HFConfig]] = []
        self._notes: list[str] = []

    def section(self, values: dict[str, Any], name: str | None = None) -> "HFConfig":
        """A nested object of the file, with the same checks.

        Args:
            name: under which its unread keys are reported with this config's; None: they are not.
        """
        made = HFConfig(replace(self._checkpoint, config=values))
        if name is not None:
            self._sections.append((name, made))
        return made

    def text(self, *towers: str, defaults: Mapping[str, Any] | None = None) -> "HFConfig":
        """The config of a multimodal checkpoint's text model: `text_config`, or this config if that is absent.

        Args:
            towers: keys of the skipped parts of the model, such as vision towers.
            defaults: settings that the class of the checkpoint gives a `text_config` without them.
        """
        values = self.find("text_config", dict)
        if values is None:
            return self
        self.expect("is_encoder_decoder", False)
        self._read.update(towers)
        # Of the whole checkpoint: `transformers` writes them outside of the text model's config.
        outer = {key: self._values[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if self.has(key)}
        self._read.update(outer)
        text = self.section({**(defaults or {}), **_given(values), **outer}, "text_config")
        text.ignore("quantization_config")  # read where it matters
        return text

    def include(self, name: str, section: "HFConfig") -> None:
        """Report a section's unread keys with this config's."""
        self._sections.append((name, section))

    def note(self, text: str) -> None:
        """Add a warning, to be logged when the model is loaded."""
        self._notes.append(text)

    def read_section(self, name: str) -> "HFConfig | None":
        """The section of this name, if it has been read."""
        return next((section for known, section in self._sections if known == name), None)

    @property
    def names_media_file(self) -> bool:
        """Whether the user named an mmproj file, which then must be used."""
        media = self._checkpoint.media
        return media is not None and not media.is_beside

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the object."""
        return tuple(self._values)

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null."""
        return self._values.get(key) is not None

    def is_list(self, key: str) -> bool:
        """Whether the value of `key` is a list."""
        return isinstance(self._values.get(key), list)

    def is_null(self, key: str) -> bool:
        """Whether `key` is present and null."""
        if key in self._values and self._values[key] is None:
            self._read.add(key)
            return True
        return False

    def get(self, key: str, default: T) -> T:
        """The value of `key`, or `default` if it is absent or null.

        Raises:
            CheckpointError: the value has another type than the default.
        """
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else self._typed(key, value, type(default))

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, or None if it is absent or null. Raises as `get` does."""
        self._read.add(key)
        value = self._values.get(key)
        return None if value is None else self._typed(key, value, kind)

    def need(self, key: str, kind: type[T]) -> T:
        """The value of `key`.

        Raises:
            CheckpointError: the key is absent, or its value has another type.
        """
        value = self.find(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file} lacks {key!r}")
        return value

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer from `least` to the key's upper limit, or `default` if it is absent or null.

        Raises:
            CheckpointError: the value is out of range or not an integer, or the key is absent and has no default.
        """
        value = self.find_size(key, least)
        if value is None and default is None:
            raise CheckpointError(f"{self.file} lacks {key!r}")
        return cast(int, default) if value is None else value

    def find_size(self, key: str, least: int = 1, *, absent: int | None = None) -> int | None:
        """Like `size`, but None if the key is null, and `absent` if it is absent."""
        if key not in self._values:
            return absent
        value = self.find(key, int)
        if value is not None and not least <= value <= LARGEST[key]:
            raise CheckpointError(f"{key} in {self.file} must be from {least} to {LARGEST[key]}, not {shown(value)}")
        return value

    def positive(self, key: str, default: float, *, or_zero: bool = False) -> float:
        """A finite number above 0 (or, with `or_zero`, 0), or `default` if it is absent or null.

        Raises:
            CheckpointError: the value is not such a number.
        """
        value = self.get(key, default)
        if not (value > 0 or (or_zero and value == 0)):
            raise CheckpointError(f"{key} in {self.file} must be {'at least' if or_zero else 'above'} 0, not {value}")
        return value

    def expect(self, key: str, *supported: Any) -> None:
        """Reject all values of `key` except those in `supported`; the first is the default.

        Raises:
            CheckpointError: `key` has another value.
        """
        self._read.add(key)
        value = self._values.get(key, supported[0])
        if value not in supported:
            raise self.unsupported(key, value, supported)

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not affect the computation."""
        self._read.update(keys)

    def unsupported(self, key: str, value: Any, supported: Any) -> CheckpointError:
        known = ", ".join(repr(s) for s in supported)
        return CheckpointError(f"{key} {shown(value)} in {self.file} is not supported; supported: {known}")

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        # JSON writers drop the point of whole numbers.
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if not abs(value) <= sys.float_info.max:  # infinite, NaN, or an integer beyond the range of floats
                raise CheckpointError(f"{key} in {self.file} must be a finite number, not {shown(value)}")
            return cast(T, float(value))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{key} in {self.file} must be {_IN_JSON[kind]}, not {shown(value)}")
        return value

    def dtype(self) -> DType:
        """The dtype of the checkpoint's weights; float32 if the config does not state it."""
        name = self.find("dtype", str) or self.get("torch_dtype", "float32")
        if name not in BYTES_OF:
            raise self.unsupported("dtype", name, tuple(BYTES_OF))
        return cast(DType, name)

    def rope(
        self, head_dim: int, max_position: int, *, theta: float = 10000.0, partial_rotary: float = 1.0
    ) -> RopeConfig:
        """The RoPE config: from `rope_theta` and `rope_scaling`, or from `rope_parameters` (`transformers` 5).

        `theta` and `partial_rotary` are defaults for absent keys; see `rope_settings` for files with both.

        Raises:
            CheckpointError: the RoPE type, or one of its settings, is not supported.
        """
        common: dict[str, Any] = {
            "rope_theta": self.positive("rope_theta", theta),
            "partial_rotary_factor": self.positive("partial_rotary_factor", partial_rotary),
            "original_max_position_embeddings": self.size("original_max_position_embeddings", max_position),
        }
        return self.rope_of(common | _given(self.rope_settings(common)), head_dim, max_position)

    def rope_settings(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_scaling` if it is given, else `rope_parameters`, as in `transformers`; empty if neither is.

        Args:
            common: settings that apply where `rope_scaling` has none.

        Raises:
            CheckpointError: `rope_scaling` would replace a theta or the like of `rope_parameters` by a default.
        """
        scaling, parameters = self.find("rope_scaling", dict), self.find("rope_parameters", dict)
        if not scaling or not parameters:
            return scaling or parameters or {}
        for key in _KEPT_BY_SCALING:
            old, new = parameters.get(key), common.get(key)
            if old not in (None, new) and scaling.get(key) is None:
                raise CheckpointError(
                    f"rope_scaling in {self.file} replaces rope_parameters, so {key} would be {shown(new)} instead of "
                    f"{shown(old)}; set {key} in rope_scaling, too"
                )
        return scaling

    def ropes_by_kind(
        self,
        head_dim: int,
        max_position: int,
        thetas: Mapping[str, float],
        local_theta: str | None = None,
        scaled: tuple[str, ...] = ("full_attention",),
    ) -> dict[str, RopeConfig]:
        """The RoPE config of each kind of layer, `full_attention` and `sliding_attention`; see `rope`.

        Older files have one `rope_theta`. A `rope_scaling` updates the settings of the kinds in `scaled`.

        Args:
            thetas: default theta of each kind.
            local_theta: older files' key for the theta of sliding-window layers; None: the same as for full attention.
        """
        theta = self.find("rope_theta", float)
        local = self.find(local_theta, float) if local_theta else theta
        older = {"full_attention": theta, "sliding_attention": local}
        scaling, given = (self.find(key, dict) or {} for key in ("rope_scaling", "rope_parameters"))
        found = {}
        for kind, default in thetas.items():
            common = {"rope_theta": older[kind] or default, "original_max_position_embeddings": max_position}
            parameters = self.section(given).find(kind, dict) or {}
            if kind in scaled:
                parameters = parameters | scaling
            found[kind] = self.rope_of(common | _given(parameters), head_dim, max_position)
        self.section(given).refuse_others("rope_parameters of layers", thetas)
        return found

    def rope_of(self, parameters: dict[str, Any], head_dim: int, max_position: int) -> RopeConfig:
        """The RoPE config for `parameters`, in the format of `rope_parameters`."""
        given = {"rope_theta": 10000.0, "original_max_position_embeddings": max_position} | _given(parameters)
        return _rope(self.section(given), head_dim, max_position)

    def refuse_others(self, what: str, known: Iterable[str]) -> None:
        """
        Raises:
            CheckpointError: the object has keys that are not in `known`.
        """
        strange = sorted(self._values.keys() - set(known))
        if strange:
            raise self.unsupported(what, ", ".join(strange), tuple(sorted(known)))

    def by_layer(self, key: str, num_layers: int) -> list[Any]:
        """The unchecked value of `key` for each layer: a list has one per layer, any other value is that of all.

        Raises:
            CheckpointError: the list has another length.
        """
        self._read.add(key)
        value = self._values.get(key)
        if not isinstance(value, list):
            return [value] * num_layers
        if len(value) != num_layers:
            raise CheckpointError(f"{key} in {self.file} has {len(value)} entries for {num_layers} layers")
        return value

    def layer_windows(
        self, num_layers: int, window: int | None, slides: Callable[[int], bool]
    ) -> tuple[int | None, ...]:
        """The sliding window of each layer, None for full attention: by `layer_types` if present, else by `slides`.

        Raises:
            CheckpointError: `layer_types` has an unknown kind, or not one entry per layer.
        """
        full, sliding = "full_attention", "sliding_attention"
        default = [sliding if slides(index) else full for index in range(num_layers)]
        kinds = self.layer_kinds(num_layers, (full, sliding), default)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def layer_kinds(self, num_layers: int, known: tuple[str, ...], default: list[str]) -> list[str]:
        """The kind of each layer by `layer_types`, or `default` if it is absent.

        Raises:
            CheckpointError: `layer_types` has a kind that is not in `known`, or not one entry per layer.
        """
        kinds = self.find("layer_types", list)
        if kinds is None:
            return default
        for kind in kinds:
            if kind not in known:
                raise self.unsupported("layer_types", kind, known)
        if len(kinds) != num_layers:
            raise CheckpointError(f"layer_types in {self.file} has {len(kinds)} entries for {num_layers} layers")
        return kinds

    def refuse_noncausal(self, is_bidirectional: bool) -> None:
        """
        Raises:
            CheckpointError: `is_causal` is false, and the family's attention is causal nevertheless.
        """
        for config in (self, *(section for _, section in self._sections)):
            if config._values.get("is_causal") is False and not is_bidirectional:
                raise config.unsupported("is_causal", False, (True,))
            config.ignore("is_causal")

    def unread(self) -> list[str]:
        """Keys that were not read and may affect the computation."""
        within = [f"{name}.{key}" for name, section in self._sections for key in section.unread()]
        return sorted(self._values.keys() - self._read - WITHOUT_EFFECT) + within

    def warn_of_unread(self) -> None:
        """Log a warning that lists the unread keys."""
        for note in self._notes:
            logger.warning("%s", note)
        if unread := self.unread():
            logger.warning("%s: these settings are unknown and have no effect: %s", self.file, ", ".join(unread))


def _given(parameters: dict[str, Any]) -> dict[str, Any]:
    """`parameters` without the keys that are null."""
    return {key: value for key, value in parameters.items() if value is not None}


def _rope(given: HFConfig, head_dim: int, max_position: int) -> RopeConfig:
    kind = given.find("rope_type", str) or given.get("type", "default")
    if kind not in _ROPE_TYPES:
        raise given.unsupported("rope type", kind, tuple(_ROPE_TYPES))
    given.refuse_others(f"setting of rope type {kind!r}", {*_ROPE_TYPES[kind], *_ROPE_COMMON})
    needed = () if kind in _WITHOUT_NEEDS else _ROPE_TYPES[kind][:1]
    if needed and not given.has(needed[0]):
        raise CheckpointError(f"rope type {kind!r} in {given.file} lacks {needed[0]!r}")
    share = given.positive("partial_rotary_factor", 1.0, or_zero=kind == "proportional")
    settings: dict[str, Any] = {}
    if kind == "proportional":
        settings["share"], share = min(share, 1.0), 1.0
    dim = int(head_dim * min(share, LARGEST["head_dim"]))
    for key in filter(given.has, _ROPE_TYPES[kind]):
        if key in ("frequency_factors", "short_factor", "long_factor"):
            settings[key] = _factors(given, key, dim)
        elif key == "truncate":
            settings[key] = given.get(key, True)
        else:
            settings[key] = given.positive(key, 1.0, or_zero=key in _MAY_BE_ZERO)
    rope = RopeConfig(
        dim=dim,
        theta=given.positive("rope_theta", 10000.0),
        type=cast(RopeType, "default" if kind == "mrope" else kind),
        original_max_position=given.size("original_max_position_embeddings"),
        **settings,
    )
    _check_rope(rope, given)
    return _longrope(rope, given, max_position) if rope.type == "longrope" else rope


def _longrope(rope: RopeConfig, given: HFConfig, max_position: int) -> RopeConfig:
    """Set the attention factor that `transformers` derives if the config has none."""
    given.need("long_factor", list)
    if rope.attention_factor is not None:
        return rope
    stretched = rope.factor if given.has("factor") else max_position / rope.original_max_position
    if stretched <= 1 or rope.original_max_position < 2:
        return replace(rope, attention_factor=1.0)
    return replace(rope, attention_factor=math.sqrt(1 + math.log(stretched) / math.log(rope.original_max_position)))


def _factors(given: HFConfig, key: str, dim: int) -> tuple[float, ...]:
    """Read a list with one factor per frequency."""
    factors = given.need(key, list)
    if len(factors) != dim // 2 or not all(
        type(factor) in (int, float) and 0 < factor < math.inf for factor in factors
    ):
        raise CheckpointError(f"{key} in {given.file} must be a list of {dim // 2} numbers above 0")
    return tuple(map(float, factors))


def _check_rope(rope: RopeConfig, config: HFConfig) -> None:
    """Reject settings that cannot be computed."""
    if rope.type == "llama3" and not rope.low_freq_factor <= rope.high_freq_factor:
        raise CheckpointError(
            f"low_freq_factor in {config.file} must be at most high_freq_factor, {rope.high_freq_factor}; it is "
            f"{rope.low_freq_factor}"
        )
    if rope.type == "yarn" and not rope.theta > 1:
        raise CheckpointError(f"rope_theta in {config.file} must be above 1 for rope type 'yarn', not {rope.theta}")
    longest = LARGEST["max_position_embeddings"]
    if rope.original_max_position * rope.factor > longest:
        raise CheckpointError(
            f"factor in {config.file} extends a context of {rope.original_max_position} tokens {rope.factor:g}-fold; "
            f"the limit is {longest} tokens"
        )
