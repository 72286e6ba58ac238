"""Llama 4's vision tower.

x = norm([patches, class token] + position embeddings)
x += attention(norm(x)); x += mlp(norm(x))      half of a head's pairs rotate by the column, half by the row, from 1 on;
                                                the class token does not rotate
features = W3 gelu(W2 gelu(W1 [norm(x) of 2 x 2 patches]))
"""

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.towers.reading import check_divided, read_axial_theta, read_merge, tower_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ConnectorPart, MergeSpec, PatchPositions, PatchSpec, ProjectionSpec, TowerSpec

_EPS = 1e-5


def llama4_vision_tower(vision: HFConfig, text_size: int) -> TowerSpec:
    """Read Llama 4's tower.

    Args:
        text_size: hidden size of the text model.

    Raises:
        CheckpointError: a setting is not supported.
    """
    vision.expect("num_channels", 3)
    vision.expect("hidden_act", "gelu")
    vision.expect("vision_feature_select_strategy", "default")
    vision.expect("multi_modal_projector_bias", False)
    vision.expect("norm_eps", _EPS)
    vision.ignore("projector_dropout")
    hidden, heads = vision.size("hidden_size", 768), vision.size("num_attention_heads", 16)
    check_divided(vision, hidden, 4 * heads, "parts of heads")
    patch, side = vision.size("patch_size", 14), vision.size("image_size", 448)
    merge = read_merge(vision, "pixel_shuffle_ratio")
    check_divided(vision, side, patch * merge, "merged patches of a side")
    attention = AttentionSpec(
        hidden,
        heads,
        heads,
        hidden // heads,
        (hidden // heads) ** -0.5,
        RopeConfig(hidden // heads, read_axial_theta(vision)),
        qkv_bias=True,
        output_bias=True,
        bidirectional=True,
        interleaved_rope=True,
        names=AttentionNames(),
    )
    mlp = PlainMLPSpec(
        hidden, vision.size("intermediate_size", 5632), bias=True, up="mlp.fc1", down="mlp.fc2", activation="gelu"
    )
    return TowerSpec(
        hidden_size=hidden,
        patch=PatchSpec("vision_model.patch_embedding.linear", patch, bias=False, flat="channels"),
        merge=merge,
        layers=tower_layers(
            "vision_model.model.layers",
            vision.size("num_hidden_layers", 34),
            attention,
            mlp,
            (_norm("input_layernorm", hidden), _norm("post_attention_layernorm", hidden)),
        ),
        connector=_connector(vision, mlp.intermediate_size, hidden * merge**2, text_size),
        positions=PatchPositions("vision_model.positional_embedding_vlm", side // patch, class_row="last"),
        class_token="vision_model.class_embedding",
        rope=attention.rope,
        first_place=1,
        columns_first=True,
        first_norm=_norm("vision_model.layernorm_pre", hidden),
        last_norm=_norm("vision_model.layernorm_post", hidden),
        side=side,
    )


def _connector(vision: HFConfig, inner: int, merged: int, text_size: int) -> tuple[ConnectorPart, ...]:
    """
    Args:
        inner: the size that the first map takes.
        merged: elements of merged patches.

    Raises:
        CheckpointError: sizes do not fit each other.
    """
    out = vision.size("projector_output_dim", 4096)
    if inner != merged:
        raise vision.unsupported("intermediate_size", inner, (merged,))
    vision.expect("projector_input_dim", out)
    vision.expect("vision_output_dim", out)
    name = "vision_model.vision_adapter.mlp"
    return (
        MergeSpec(),
        ProjectionSpec(f"{name}.fc1", merged, out, activation="gelu"),
        ProjectionSpec(f"{name}.fc2", out, out, activation="gelu"),
        ProjectionSpec("multi_modal_projector.linear_1", out, text_size),
    )


def _norm(name: str, size: int) -> NormSpec:
    return NormSpec(name, size, _EPS, bias=True, centred=True)
