"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen-Omni.

x = patches + resampled position embeddings     Qwen2-VL and 2.5: without these
x += attention(norm(x)); x += mlp(norm(x))      rotary angles by row and column
features = W2 gelu(W1 [norm(x) of 2 x 2 patches])

Qwen2-VL has layer norms and plain MLPs. Qwen2.5-VL has RMS norms, gated MLPs, and windows in most layers. Qwen3-VL has
taps (DeepStack). An image is two equal frames.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.config.feed_forward import Activation
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import GatedMLPSpec, PlainActivation, PlainMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.towers.reading import check_divided, read_activation, read_axial_theta, tower_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ConnectorPart, MergeSpec, PatchPositions, PatchSpec, ProjectionSpec, TowerSpec

_ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
_PLAIN_ACTIVATIONS: dict[str, PlainActivation] = {**_ACTIVATIONS, "quick_gelu": "quick_gelu"}
_EPS = 1e-6


class MergerNames(NamedTuple):
    """Names of the maps to features in Qwen3-VL; Qwen3-Omni has others."""

    merger: str = "visual.merger"
    taps: str = "visual.deepstack_merger_list"
    norm: str = "norm"
    first: str = "linear_fc1"
    second: str = "linear_fc2"


QWEN3_VL = MergerNames()


def qwen3_vision_tower(
    vision: HFConfig, text_size: int, *, taps: tuple[int, ...], names: MergerNames = QWEN3_VL
) -> TowerSpec:
    """Read the tower of Qwen3-VL, Qwen3.5 or Qwen3-Omni.

    Args:
        text_size: hidden size of the text model.
        taps: the default of `deepstack_visual_indexes`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    hidden, attention, patch, merge = _read(vision, patch_size=16)
    vision.expect("out_hidden_size", text_size)
    mlp = PlainMLPSpec(
        hidden,
        vision.size("intermediate_size", 4304),
        bias=True,
        up="mlp.linear_fc1",
        down="mlp.linear_fc2",
        activation=read_activation(vision, _ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    depth, places = vision.size("depth", 27), vision.size("num_position_embeddings", 2304)
    if math.isqrt(places) ** 2 != places:
        raise vision.unsupported("num_position_embeddings", places, ("squares",))
    tapped = vision.get("deepstack_visual_indexes", list(taps))
    if not all(type(index) is int and 0 <= index < depth for index in tapped) or sorted({*tapped}) != tapped:
        raise vision.unsupported("deepstack_visual_indexes", tapped, ("ascending indices of layers",))
    wide = hidden * merge**2

    def merger(name: str, *, norm_first: bool) -> tuple[ConnectorPart, ...]:
        norm = _layer_norm(f"{name}.{names.norm}", hidden if norm_first else wide)
        first = ProjectionSpec(f"{name}.{names.first}", wide, wide, bias=True, activation="gelu")
        second = ProjectionSpec(f"{name}.{names.second}", wide, text_size, bias=True)
        ends: tuple[ConnectorPart, ...] = (norm, MergeSpec()) if norm_first else (MergeSpec(), norm)
        return (*ends, first, second)

    norms = (_layer_norm("norm1", hidden), _layer_norm("norm2", hidden))
    return TowerSpec(
        hidden_size=hidden,
        patch=replace(patch, bias=True),
        merge=merge,
        layers=tower_layers("visual.blocks", depth, attention, mlp, norms),
        connector=merger(names.merger, norm_first=True),
        positions=PatchPositions("visual.pos_embed.weight", math.isqrt(places), "bilinear"),
        rope=attention.rope,
        taps=tuple((layer, merger(f"{names.taps}.{index}", norm_first=False)) for index, layer in enumerate(tapped)),
    )


def qwen2_vision_tower(vision: HFConfig, text_size: int) -> TowerSpec:
    """Read the tower of Qwen2-VL; the arguments are those of `qwen3_vision_tower`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    hidden, attention, patch, merge = _read(vision, patch_size=14, size="embed_dim", default=1280)
    vision.expect("hidden_size", text_size)
    mlp = PlainMLPSpec(
        hidden,
        hidden * vision.size("mlp_ratio", 4),
        bias=True,
        up="mlp.fc1",
        down="mlp.fc2",
        activation=read_activation(vision, _PLAIN_ACTIVATIONS, "quick_gelu"),
    )
    wide = hidden * merge**2
    norms = (_layer_norm("norm1", hidden), _layer_norm("norm2", hidden))
    return TowerSpec(
        hidden_size=hidden,
        patch=patch,
        merge=merge,
        layers=tower_layers("visual.blocks", vision.size("depth", 32), attention, mlp, norms),
        connector=(
            _layer_norm("visual.merger.ln_q", hidden),
            MergeSpec(),
            ProjectionSpec("visual.merger.mlp.0", wide, wide, bias=True, activation="gelu"),
            ProjectionSpec("visual.merger.mlp.2", wide, text_size, bias=True),
        ),
        rope=attention.rope,
    )


def qwen2_5_vision_tower(vision: HFConfig, text_size: int, qkv: tuple[str, ...] = ("attn.qkv",)) -> TowerSpec:
    """Read the tower of Qwen2.5-VL or Qwen2.5-Omni; the arguments are those of `qwen3_vision_tower`.

    Args:
        qkv: names of the maps to queries, keys and values.

    Raises:
        CheckpointError: a setting is not supported.
    """
    hidden, attention, patch, merge = _read(vision, patch_size=14)
    attention = replace(attention, names=replace(attention.names, qkv=qkv))
    vision.expect("out_hidden_size", text_size)
    activation = read_activation(vision, _ACTIVATIONS, "silu")
    mlp = GatedMLPSpec(hidden, vision.size("intermediate_size", 3420), bias=True, activation=activation)
    depth, window = vision.size("depth", 32), vision.size("window_size", 112)
    check_divided(vision, window, patch.size * merge, "merged patches of a window")
    whole: list[Any] = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not all(type(index) is int for index in whole):
        raise vision.unsupported("fullatt_block_indexes", whole, ("indices of layers",))
    wide = hidden * merge**2
    vision.ignore("tokens_per_second")  # of videos
    return TowerSpec(
        hidden_size=hidden,
        patch=patch,
        merge=merge,
        layers=tower_layers(
            "visual.blocks",
            depth,
            attention,
            mlp,
            (NormSpec("norm1", hidden, _EPS), NormSpec("norm2", hidden, _EPS)),
        ),
        connector=(
            NormSpec("visual.merger.ln_q", hidden, _EPS),
            MergeSpec(),
            ProjectionSpec("visual.merger.mlp.0", wide, wide, bias=True, activation="gelu"),
            ProjectionSpec("visual.merger.mlp.2", wide, text_size, bias=True),
        ),
        rope=attention.rope,
        window=window // patch.size,
        whole_layers=tuple(whole),
    )


def _read(
    vision: HFConfig, patch_size: int, size: str = "hidden_size", default: int = 1152
) -> tuple[int, AttentionSpec, PatchSpec, int]:
    """The hidden size, the attention, the patch embedding without a bias, and the patches merged along an axis.

    Args:
        patch_size: default of the setting of this name.
        size, default: name and default of the hidden size.
    """
    for key in ("in_channels", "in_chans"):
        vision.expect(key, 3)
    hidden, heads = vision.size(size, default), vision.size("num_heads", 16)
    check_divided(vision, hidden, 4 * heads, "parts of heads")
    rope = RopeConfig(hidden // heads, read_axial_theta(vision))
    frames = vision.size("temporal_patch_size", 2)
    patch = PatchSpec("visual.patch_embed.proj", vision.size("patch_size", patch_size), bias=False, frames=frames)
    merge = vision.size("spatial_merge_size", 2)
    vision.ignore("spatial_patch_size", "in_chans")
    attention = AttentionSpec(
        hidden,
        heads,
        heads,
        hidden // heads,
        (hidden // heads) ** -0.5,
        rope,
        qkv_bias=True,
        output_bias=True,
        bidirectional=True,
        names=AttentionNames(qkv=("attn.qkv",), output="attn.proj"),
    )
    return hidden, attention, patch, merge


def _layer_norm(name: str, size: int) -> NormSpec:
    return NormSpec(name, size, _EPS, bias=True, centred=True)
