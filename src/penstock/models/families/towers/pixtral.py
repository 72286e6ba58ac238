"""Pixtral's tower (Agrawal et al., 2024, arXiv:2410.07073), also of Mistral Small 3 and Ministral 3.

x = norm(patches)
x += attention(norm(x)); x += mlp(norm(x))      RMS norms, gated MLPs, no biases; even frequencies rotate by the row,
                                                odd ones by the column
"""

from penstock.config.feed_forward import Activation
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.towers.reading import check_divided, read_activation, read_axial_theta, tower_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import PatchSpec, TowerSpec

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_EPS = 1e-5


def pixtral_tower(vision: HFConfig, name: str, merge: int) -> TowerSpec:
    """Read a Pixtral tower, without its connector.

    Args:
        name: prefix of its tensor names.
        merge: see `TowerSpec`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    vision.expect("num_channels", 3)
    hidden, heads = vision.size("hidden_size", 1024), vision.size("num_attention_heads", 16)
    head_dim = vision.size("head_dim", hidden // heads)
    check_divided(vision, hidden, heads, "heads")
    check_divided(vision, head_dim, 4, "parts of a head")
    vision.expect("head_dim", None, hidden // heads)
    vision.ignore("image_size")  # of the largest picture: the processor's settings say it
    rope = RopeConfig(head_dim, read_axial_theta(vision))
    attention = AttentionSpec(
        hidden,
        heads,
        heads,
        head_dim,
        head_dim**-0.5,
        rope,
        bidirectional=True,
        names=AttentionNames(
            qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), output="attention.o_proj"
        ),
    )
    mlp = GatedMLPSpec(
        hidden,
        vision.size("intermediate_size", 4096),
        activation=read_activation(vision, _ACTIVATIONS, "gelu"),
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    )
    norms = (NormSpec("attention_norm", hidden, _EPS), NormSpec("ffn_norm", hidden, _EPS))
    return TowerSpec(
        hidden_size=hidden,
        patch=PatchSpec(f"{name}.patch_conv", vision.size("patch_size", 16), bias=False),
        merge=merge,
        layers=tower_layers(f"{name}.transformer.layers", vision.size("num_hidden_layers", 24), attention, mlp, norms),
        connector=(),
        rope=rope,
        alternating=True,
        first_norm=NormSpec(f"{name}.ln_pre", hidden, _EPS),
    )
