"""Gemma 4's vision tower.

x = patches + vector of the column + vector of the row
x += norm(attention(norm(x))); x += norm(mlp(norm(x)))      norms of heads; half of a head rotates by the column
features = W root_mean(sqrt(hidden_size) * mean of 3 x 3 patches)

The inputs and outputs of linear layers may have limits.
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.towers.reading import check_divided, read_axial_theta
from penstock.models.hf_config import HFConfig
from penstock.models.spec import (
    LayerSpec,
    MergeSpec,
    PatchPositions,
    PatchSpec,
    ProjectionSpec,
    RootMeanSpec,
    SubLayer,
    TowerSpec,
)


def gemma4_vision_tower(vision: HFConfig, text_size: int, stand_in: int | None) -> TowerSpec:
    """Read Gemma 4's tower.

    Args:
        text_size: hidden size of the text model.
        stand_in: see `TowerSpec`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    vision.expect("model_type", "gemma4_vision")
    vision.expect("hidden_activation", "gelu_pytorch_tanh")
    vision.expect("attention_bias", False, None)
    hidden, head_dim = vision.size("hidden_size", 768), vision.size("head_dim", 64)
    check_divided(vision, head_dim, 4, "quarters of a head")
    eps, clipped = vision.positive("rms_norm_eps", 1e-6), vision.get("use_clipped_linears", False)
    rope = RopeConfig(head_dim, read_axial_theta(vision, 100.0))
    layer = _layer(vision, hidden, rope, eps, clipped=clipped)
    merge = vision.size("pooling_kernel_size", 3)
    standardized = vision.get("standardize", False)
    vision.ignore("default_output_length", "max_position_embeddings")
    names = [f"vision_tower.std_{name}" if standardized else None for name in ("bias", "scale")]
    patch = PatchSpec(
        "vision_tower.patch_embedder.input_proj", vision.size("patch_size", 16), bias=False, flat="pixels"
    )
    return TowerSpec(
        hidden_size=hidden,
        patch=patch,
        merge=merge,
        layers=tuple(
            replace(layer, name=f"vision_tower.encoder.layers.{index}")
            for index in range(vision.size("num_hidden_layers", 16))
        ),
        connector=(
            MergeSpec(mean=True, factor=hidden**0.5, bias=names[0], scale=names[1]),
            RootMeanSpec(hidden, eps),
            ProjectionSpec("embed_vision.embedding_projection", hidden, text_size),
        ),
        positions=PatchPositions(
            "vision_tower.patch_embedder.position_embedding_table",
            vision.size("position_embedding_size", 10240),
            "axes",
        ),
        rope=rope,
        columns_first=True,
        by_halves=True,
        from_minus_one=True,
        stand_in=stand_in,
    )


def _layer(vision: HFConfig, hidden: int, rope: RopeConfig, eps: float, *, clipped: bool) -> LayerSpec:
    heads = vision.size("num_attention_heads", 12)
    kv_heads = vision.size("num_key_value_heads", 12)
    check_divided(vision, heads, kv_heads, "groups of heads")
    attention = AttentionSpec(
        hidden,
        heads,
        kv_heads,
        rope.dim,
        1.0,
        rope,
        bidirectional=True,
        qk_norm_eps=eps,
        value_norm=True,
        clipped=clipped,
        names=AttentionNames(
            qkv=tuple(f"self_attn.{name}_proj.linear" for name in "qkv"), output="self_attn.o_proj.linear"
        ),
    )
    mlp = GatedMLPSpec(
        hidden,
        vision.size("intermediate_size", 3072),
        activation="gelu_tanh",
        gate_up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
        down="mlp.down_proj.linear",
        clipped=clipped,
    )

    def norm(name: str) -> NormSpec:
        return NormSpec(name, hidden, eps)

    return LayerSpec(
        "",
        SubLayer(attention, norm("input_layernorm"), norm("post_attention_layernorm")),
        SubLayer(mlp, norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")),
    )
