"""Reading a Hugging Face `config.json` without overlooking anything in it.

Every key is read by a family, known to be without effect on what we compute, or reported: a setting that we do not
implement must not be silently ignored.
"""

import logging
from typing import Any, TypeVar, cast

from penstock.checkpoint import Checkpoint
from penstock.errors import CheckpointError
from penstock.layers.rope import RopeConfig, RopeType
from penstock.memory import BYTES_OF, DType

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Keys that change nothing in the forward pass of inference.
_BOOKKEEPING = {
    "model_type",
    "transformers_version",
    "_name_or_path",
    "auto_map",
    "tokenizer_class",
    "torch_dtype",
    "dtype",
}
_TRAINING = {"initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "pretraining_tp"}
_HOW_TO_RUN = {
    "use_cache",
    "is_decoder",
    "gradient_checkpointing",
    "_attn_implementation",
    "_attn_implementation_autoset",
}
_OUTPUTS = {"id2label", "label2id", "num_labels", "return_dict", "output_attentions", "output_hidden_states"}
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"}  # the tokenizer's affair
_ONLY_WITH_OTHERS = {"original_max_position_embeddings", "max_window_layers"}  # matter where another key asks for them
_WITHOUT_EFFECT = _BOOKKEEPING | _TRAINING | _HOW_TO_RUN | _OUTPUTS | _TOKENS | _ONLY_WITH_OTHERS

_ROPE_TYPES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    },
}


class HFConfig:
    """A `config.json`, read with types checked, that remembers which keys were read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.file = checkpoint.path / "config.json"
        self._values = checkpoint.config
        self._read: set[str] = set()

    def get(self, key: str, default: T) -> T:
        """The value of `key`, or `default` where it is absent or null.

        Raises:
            CheckpointError: it is of another type than the default.
        """
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else self._typed(key, value, type(default))

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, or None where it is absent or null. Raises as `get` does."""
        self._read.add(key)
        value = self._values.get(key)
        return None if value is None else self._typed(key, value, kind)

    def need(self, key: str, kind: type[T]) -> T:
        """The value of `key`.

        Raises:
            CheckpointError: it is absent or of another type.
        """
        value = self.find(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file} lacks {key!r}")
        return value

    def need_positive(self, key: str) -> int:
        """A whole number above 0. Raises as `need` does."""
        value = self.need(key, int)
        if value < 1:
            raise CheckpointError(f"{key} in {self.file} must be positive, not {value}")
        return value

    def expect(self, key: str, *supported: Any) -> None:
        """Refuse every value of `key` but those supported; the first is the one that an absent key stands for.

        Raises:
            CheckpointError: it has another value.
        """
        self._read.add(key)
        value = self._values.get(key, supported[0])
        if value not in supported:
            raise self.unsupported(key, value, supported)

    def unsupported(self, key: str, value: Any, supported: Any) -> CheckpointError:
        known = ", ".join(repr(s) for s in supported)
        return CheckpointError(f"{key} {value!r} in {self.file} is not supported; supported: {known}")

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return cast(T, float(value))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{key} in {self.file} must be {kind.__name__}, not {value!r}")
        return value

    def dtype(self) -> DType:
        """The type of the checkpoint's weights; float32 where it names none."""
        name = self.find("dtype", str) or self.get("torch_dtype", "float32")
        if name not in BYTES_OF:
            raise self.unsupported("dtype", name, tuple(BYTES_OF))
        return cast(DType, name)

    def rope(self, head_dim: int, max_position: int) -> RopeConfig:
        """Rotary positions: `rope_theta` and `rope_scaling`, or `rope_parameters` as `transformers` 5 spells them.

        Raises:
            CheckpointError: a type of scaling, or a setting of it, that we do not implement.
        """
        theta = self.get("rope_theta", 10000.0)
        partial = self.get("partial_rotary_factor", 1.0)
        scaling = self.find("rope_parameters", dict) or self.find("rope_scaling", dict) or {}
        self._read.add("rope_scaling")
        return _rope(self, dict(scaling), theta, partial, head_dim, max_position)

    def layer_windows(self, num_layers: int, window: int | None, first_sliding_layer: int) -> tuple[int | None, ...]:
        """The window of each layer: by `layer_types` where it is given, else `window` from a layer on.

        Raises:
            CheckpointError: `layer_types` names an unknown kind of layer, or not one a layer.
        """
        kinds = self.find("layer_types", list)
        if kinds is None:
            return tuple(window if index >= first_sliding_layer else None for index in range(num_layers))
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.unsupported("layer_types", kind, ("full_attention", "sliding_attention"))
        if len(kinds) != num_layers:
            raise CheckpointError(f"layer_types in {self.file} names {len(kinds)} layers of {num_layers}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def finish(self) -> None:
        """Report what nobody read."""
        unread = sorted(self._values.keys() - self._read - _WITHOUT_EFFECT)
        if unread:
            logger.warning("%s: these settings are unknown and have no effect: %s", self.file, ", ".join(unread))


def _rope(
    config: HFConfig, scaling: dict[str, Any], theta: float, partial: float, head_dim: int, max_position: int
) -> RopeConfig:
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _ROPE_TYPES:
        raise config.unsupported("rope type", kind, tuple(_ROPE_TYPES))
    theta = scaling.pop("rope_theta", None) or theta
    partial = scaling.pop("partial_rotary_factor", None) or partial
    known = _ROPE_TYPES[kind]
    settings = {key: value for key, value in scaling.items() if value is not None}
    strange = sorted(settings.keys() - known - {"original_max_position_embeddings"})
    if strange:
        raise config.unsupported(f"setting of rope type {kind!r}", ", ".join(strange), tuple(sorted(known)))
    if kind != "default" and "factor" not in settings:
        raise CheckpointError(f"rope type {kind!r} in {config.file} lacks 'factor'")
    original = settings.pop("original_max_position_embeddings", None)
    if original is None:
        original = config.get("original_max_position_embeddings", max_position)
    numbers = {"theta": theta, **settings}
    for key, value in numbers.items():
        if not isinstance(value, (int, float)):
            raise CheckpointError(f"{key} of the rope settings in {config.file} must be a number, not {value!r}")
    return RopeConfig(dim=int(head_dim * partial), type=cast(RopeType, kind), original_max_position=original, **numbers)
