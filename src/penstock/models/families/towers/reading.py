"""What the vision towers of several families share: reading `vision_config`, layers, and multi-axis positions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from penstock.api.request import MediaKind
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.mlp import PlainActivation
from penstock.layers.spec import FeedForwardSpec, NormSpec
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, LayerSpec, ModelSpec, SubLayer, TowerSpec

_MOST_MERGED = 64
ActivationT = TypeVar("ActivationT", bound=PlainActivation)
SpecT = TypeVar("SpecT", TowerSpec, AudioEncoderSpec)


def read_tower(config: HFConfig, read: Callable[[HFConfig], TowerSpec]) -> TowerSpec | None:
    """The tower that `read` makes of `vision_config`. See `read_section`."""
    return read_section(config, "vision_config", "image", "vision tower", read)


def read_section(
    config: HFConfig, key: str, kind: MediaKind, what: str, read: Callable[[HFConfig], SpecT]
) -> SpecT | None:
    """What `read` makes of the section `key`, the encoder of `kind`; None: there is none, or a setting is refused.

    The text model is served in any case; the refusal is logged when the model is loaded.

    Raises:
        CheckpointError: `read` refuses a setting of an mmproj file that the user named.
    """
    values = config.find(key, dict)
    if values is None:
        return None
    section = config.section(values)
    try:
        made = read(section)
    except CheckpointError as error:
        if config.names_media_file:
            raise
        config.note(f"this model takes no {kind}s, as its {what} is not supported: {error}")
        return None
    section.ignore("is_encoder_decoder", "vocab_size")  # of the class that writes it
    config.include(key, section)
    return made


def read_activation(config: HFConfig, known: Mapping[str, ActivationT], default: str) -> ActivationT:
    """The activation `hidden_act`.

    Raises:
        CheckpointError: it is not in `known`.
    """
    name = config.get("hidden_act", default)
    if name not in known:
        raise config.unsupported("hidden_act", name, tuple(known))
    return known[name]


def read_merge(config: HFConfig, key: str) -> int:
    """The patches merged along an axis, whose reciprocal is the setting `key`; a half by default.

    Raises:
        CheckpointError: it is no reciprocal of an integer.
    """
    ratio = config.positive(key, 0.5)
    merge = round(1 / ratio) if ratio >= 1 / _MOST_MERGED else 0
    if merge * ratio != 1:
        raise config.unsupported(key, ratio, ("reciprocals of integers",))
    return merge


def read_side(config: HFConfig, key: str, default: int) -> int:
    """A height that equals the width: a size, or a list of both.

    Raises:
        CheckpointError: they differ, or are no sizes.
    """
    given = config.get(key, [default] * 2) if config.is_list(key) else [config.size(key, default)] * 2
    if len(given) != 2 or given[0] != given[1]:
        raise config.unsupported(key, given, ("squares",))
    return config.section({key: given[0]}).size(key)


def check_divided(config: HFConfig, total: int, parts: int, what: str) -> None:
    """
    Raises:
        CheckpointError: `total` is not a multiple of `parts`.
    """
    if total % parts:
        raise CheckpointError(f"vision_config in {config.file}: {total} cannot be divided into {parts} {what}")


def tower_layers(
    name: str,
    count: int,
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    norms: tuple[NormSpec, NormSpec],
) -> tuple[LayerSpec, ...]:
    """Pre-norm layers `name`.0 to `name`.count - 1; `norms` are those before attention and feed-forward part."""
    first, second = norms
    return tuple(
        LayerSpec(f"{name}.{index}", SubLayer(attention, first), SubLayer(feed_forward, second))
        for index in range(count)
    )


def read_axial_theta(vision: HFConfig, theta: float = 10000.0) -> float:
    """The base of the rotary frequencies of two axes; `theta` by default.

    Raises:
        CheckpointError: the embedding has another type.
    """
    given = vision.section(vision.find("rope_parameters", dict) or {})
    given.expect("rope_type", "axial", "default", None)
    given.ignore("rope_theta")
    given.refuse_others("rope_parameters", {"rope_type", "rope_theta"})
    return given.positive("rope_theta", vision.positive("rope_theta", theta))


def with_axes(model: ModelSpec, text: HFConfig, sections: list[int], *, interleaved: bool = True) -> ModelSpec:
    """The model with rotary positions on three axes in its attention; see `read_axes`.

    Its multi-token prediction head keeps one axis, as it drafts for requests without images alone.
    """

    def turned(layer: LayerSpec) -> LayerSpec:
        if layer.mixer is None or not isinstance(layer.mixer.part, AttentionSpec) or layer.mixer.part.rope is None:
            return layer
        attention = layer.mixer.part
        assert attention.rope is not None
        axes = read_axes(text, attention.rope.dim, sections, interleaved=interleaved)
        part = replace(attention, rope=replace(attention.rope, axes=axes))
        return replace(layer, mixer=replace(layer.mixer, part=part))

    return replace(model, layers=tuple(turned(layer) for layer in model.layers))


def read_axes(text: HFConfig, rope_dim: int, sections: list[int], *, interleaved: bool) -> tuple[int, ...]:
    """`RopeConfig.axes` by `mrope_section`, or by the default `sections`.

    Args:
        interleaved: whether axes take turns, until each of the last two has its share; else each has a run.

    Raises:
        CheckpointError: the sections do not add up to the frequencies.
    """
    settings: dict[str, Any] = text.find("rope_scaling", dict) or text.find("rope_parameters", dict) or {}
    given = settings.get("mrope_section") or sections
    half = rope_dim // 2
    if len(given) != 3 or not all(type(section) is int and section >= 0 for section in given) or sum(given) != half:
        raise text.unsupported("mrope_section", given, (f"three numbers whose sum is {half}",))
    if not interleaved:
        return tuple(axis for axis, count in enumerate(given) for _ in range(count))
    axes = [0] * half
    for axis in (1, 2):
        for index in range(axis, min(3 * given[axis], half), 3):
            axes[index] = axis
    return tuple(axes)
