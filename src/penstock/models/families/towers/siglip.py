"""SigLIP (Zhai et al., 2023, arXiv:2303.15343): the tower of SmolVLM, Idefics 3, Gemma 3 and LFM2-VL.

x = patches + position embeddings
x += attention(norm(x)); x += mlp(norm(x))      each patch sees all; layer norms; biases everywhere
"""

import math
from dataclasses import replace

from penstock.config.feed_forward import Activation
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import NormSpec
from penstock.models.families.towers.reading import check_divided, read_activation, tower_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import PatchPositions, PatchSpec, TowerSpec

_ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def siglip_tower(
    vision: HFConfig,
    name: str,
    *,
    hidden_size: int = 768,
    num_heads: int = 12,
    patch_size: int = 16,
    merge: int | None = None,
    features: int | None = None,
) -> TowerSpec:
    """Read a SigLIP tower, without its connector.

    Args:
        name: prefix of its tensor names.
        hidden_size, num_heads, patch_size: defaults of the settings of these names.
        merge: see `TowerSpec`; None: as many patches as make `features`.
        features: number of a picture's features.

    Raises:
        CheckpointError: a setting is not supported.
    """
    side = vision.size("image_size", 224)
    if merge is None:
        assert features is not None
        merge = max(1, side // vision.size("patch_size", patch_size) // max(1, math.isqrt(features)))
    tower = _siglip(vision, name, hidden_size, num_heads, patch_size, merge)
    check_divided(vision, side, tower.patch.size * merge, "merged patches of a side")
    positions = PatchPositions(f"{name}.embeddings.position_embedding.weight", side // tower.patch.size)
    return replace(tower, positions=positions, side=side)


def siglip2_tower(vision: HFConfig, name: str, merge: int) -> TowerSpec:
    """Read a SigLIP 2 tower for pictures of any shape (NaFlex; Tschannen et al., 2025, arXiv:2502.14786).

    The arguments are those of `siglip_tower`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    tower = _siglip(vision, name, 768, 12, 16, merge)
    places = vision.size("num_patches", 256)
    if math.isqrt(places) ** 2 != places:
        raise vision.unsupported("num_patches", places, ("squares",))
    table = f"{name}.embeddings.position_embedding.weight"
    return replace(
        tower,
        patch=replace(tower.patch, flat="pixels"),
        positions=PatchPositions(table, math.isqrt(places), "antialiased"),
    )


def _siglip(vision: HFConfig, name: str, hidden_size: int, num_heads: int, patch_size: int, merge: int) -> TowerSpec:
    """The tower without positions; arguments as those of `siglip_tower`."""
    vision.expect("num_channels", 3)
    hidden, heads = vision.size("hidden_size", hidden_size), vision.size("num_attention_heads", num_heads)
    check_divided(vision, hidden, heads, "heads")
    vision.ignore("vision_use_head", "max_image_size", "size")
    eps = vision.positive("layer_norm_eps", 1e-6)
    attention = AttentionSpec(
        hidden,
        heads,
        heads,
        hidden // heads,
        (hidden // heads) ** -0.5,
        None,
        qkv_bias=True,
        output_bias=True,
        bidirectional=True,
        names=replace(AttentionNames(), output="self_attn.out_proj"),
    )
    mlp = PlainMLPSpec(
        hidden,
        vision.size("intermediate_size", 3072),
        bias=True,
        up="mlp.fc1",
        down="mlp.fc2",
        activation=read_activation(vision, _ACTIVATIONS, "gelu_pytorch_tanh"),
    )

    def norm(of: str) -> NormSpec:
        return NormSpec(of, hidden, eps, bias=True, centred=True)

    norms = (norm("layer_norm1"), norm("layer_norm2"))
    return TowerSpec(
        hidden_size=hidden,
        patch=PatchSpec(f"{name}.embeddings.patch_embedding", vision.size("patch_size", patch_size), bias=True),
        merge=merge,
        layers=tower_layers(f"{name}.encoder.layers", vision.size("num_hidden_layers", 12), attention, mlp, norms),
        connector=(),
        last_norm=norm(f"{name}.post_layernorm"),
    )
