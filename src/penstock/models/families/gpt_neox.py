"""GPT-NeoX, Pythia, Dolly: attention and MLP side by side, layer norms, RoPE on a part of each head.

x += attention(norm(x)) + Wd gelu(Wu norm(x) + bu) + bd                  two layer norms with biases; biases throughout

RoPE turns the first quarter of each head. Some models, such as RedPajama, have the parts one after the other.
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames
from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import check_rotation, read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelNames, ModelSpec

_NAMES = AttentionNames(qkv=("attention.query_key_value",), output="attention.dense")


def gpt_neox_spec(config: HFConfig) -> ModelSpec:
    """Read a `GPTNeoXForCausalLM`."""
    dense = read_dense(
        config,
        max_position=2048,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_eps",
        norm_bias=True,
        activation=None,
        reads_rope=False,
    )
    config.expect("num_key_value_heads", None, dense.attention.num_heads)
    head_dim, max_position = dense.attention.head_dim, dense.model.max_position
    theta, share = config.positive("rotary_emb_base", 10000.0), config.positive("rotary_pct", 0.25)
    rope = config.rope(head_dim, max_position, theta=theta, partial_rotary=share)
    check_rotation(rope, head_dim, config)
    bias = config.get("attention_bias", True)
    attention = replace(dense.attention, rope=rope, qkv_bias=bias, output_bias=bias, qkv_by_head=True, names=_NAMES)
    mlp = PlainMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        bias=True,
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        activation=read_activation(config, "hidden_act", "gelu"),
    )
    parallel = config.get("use_parallel_residual", True)
    layers = (dense.layer(index, attention, mlp) for index in range(dense.num_layers))
    return replace(
        dense.model,
        layers=tuple(
            replace(layer, name=layer.name.replace("model", "gpt_neox"), parallel=parallel) for layer in layers
        ),
        max_position=rope.context(max_position),
        final_norm=dense.norm("gpt_neox.final_layer_norm"),
        names=ModelNames(
            "gpt_neox.embed_in",
            "embed_out",
            ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
            prefixes=(("lm_head.", "embed_out."),),
        ),
    )
