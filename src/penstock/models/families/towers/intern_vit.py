"""InternViT, the vision tower of InternVL 2.5 to 3.5 (Chen et al., 2023, arXiv:2312.14238).

x = [patches, class token] + position embeddings
x += s1 * attention(norm(x)); x += s2 * mlp(norm(x))    learned scales of each element; some have norms of q and k
features = W2 gelu(W1 norm([2 x 2 patches]))
"""

from penstock.config.feed_forward import Activation
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import NormSpec
from penstock.models.families.towers.reading import check_divided, read_activation, read_side, tower_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ConnectorPart, MergeSpec, PatchPositions, PatchSpec, ProjectionSpec, TowerSpec

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_QK_NORM_EPS = 1e-6
_CONNECTOR_EPS = 1e-5


def intern_vit(vision: HFConfig, text_size: int, merge: int) -> TowerSpec:
    """Read the tower.

    Args:
        text_size: hidden size of the text model.
        merge: see `TowerSpec`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    vision.expect("num_channels", 3)
    vision.expect("use_absolute_position_embeddings", True)
    vision.ignore("use_mask_token", "projection_dropout", "hidden_dropout_prob", "layer_scale_init_value")
    hidden, heads = vision.size("hidden_size", 1024), vision.size("num_attention_heads", 16)
    check_divided(vision, hidden, heads, "heads")
    patch, side = read_side(vision, "patch_size", 14), read_side(vision, "image_size", 448)
    check_divided(vision, side, patch * merge, "merged patches of a side")
    kind, eps = vision.get("norm_type", "layer_norm"), vision.positive("layer_norm_eps", 1e-6)
    if kind not in ("layer_norm", "rms_norm"):
        raise vision.unsupported("norm_type", kind, ("layer_norm", "rms_norm"))

    def norm(name: str, *, centred: bool) -> NormSpec:
        return NormSpec(name, hidden, eps, bias=centred, centred=centred)

    is_centred = kind == "layer_norm"
    return TowerSpec(
        hidden_size=hidden,
        patch=PatchSpec("vision_tower.embeddings.patch_embeddings.projection", patch, bias=True),
        merge=merge,
        layers=tower_layers(
            "vision_tower.encoder.layer",
            vision.size("num_hidden_layers", 24),
            _attention(vision, hidden, heads),
            PlainMLPSpec(
                hidden,
                vision.size("intermediate_size", 4096),
                bias=True,
                up="mlp.fc1",
                down="mlp.fc2",
                activation=read_activation(vision, _ACTIVATIONS, "gelu"),
            ),
            (norm("layernorm_before", centred=is_centred), norm("layernorm_after", centred=is_centred)),
        ),
        connector=_connector(hidden * merge**2, text_size),
        positions=PatchPositions("vision_tower.embeddings.position_embeddings", side // patch, class_row="first"),
        class_token="vision_tower.embeddings.cls_token",
        layer_scales=("lambda_1", "lambda_2"),
        last_norm=None if vision.get("use_mean_pooling", True) else norm("vision_tower.layernorm", centred=True),
        side=side,
    )


def _attention(vision: HFConfig, hidden: int, heads: int) -> AttentionSpec:
    return AttentionSpec(
        hidden,
        heads,
        heads,
        hidden // heads,
        (hidden // heads) ** -0.5,
        None,
        qkv_bias=vision.get("attention_bias", False),
        output_bias=True,
        bidirectional=True,
        qk_norm_eps=_QK_NORM_EPS if vision.get("use_qk_norm", False) else None,
        qk_norm_whole=True,
        names=AttentionNames(
            qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            output="attention.projection_layer",
            query_norm="attention.q_norm",
            key_norm="attention.k_norm",
        ),
    )


def _connector(merged: int, text_size: int) -> tuple[ConnectorPart, ...]:
    name = "multi_modal_projector"
    return (
        MergeSpec(),
        NormSpec(f"{name}.layer_norm", merged, _CONNECTOR_EPS, bias=True, centred=True),
        ProjectionSpec(f"{name}.linear_1", merged, text_size, bias=True, activation="gelu"),
        ProjectionSpec(f"{name}.linear_2", text_size, text_size, bias=True),
    )
