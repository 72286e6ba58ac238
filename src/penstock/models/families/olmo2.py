"""OLMo 2 and 3: post-norms, norms over all query and key heads; OLMo 3: a sliding window in three of four layers.

q, k, v = norm(Wq x), norm(Wk x), Wv x          a norm of all heads together; none before the projections
x += norm(Wo attend(rope(q), rope(k), v))       OLMo 3: over `sliding_window` keys in three of four layers
x += norm(mlp(x))
"""

from dataclasses import replace

from penstock.layers.attention import AttentionSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer


def olmo2_spec(config: HFConfig) -> ModelSpec:
    """Read an `Olmo2ForCausalLM`."""
    dense = read_olmo(config)
    rope = config.rope(dense.attention.head_dim, dense.model.max_position)
    attention = replace(dense.attention, rope=rope)
    layers = tuple(olmo_layer(dense, index, attention) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers, max_position=rope.context(dense.model.max_position))


def olmo3_spec(config: HFConfig) -> ModelSpec:
    """Read an `Olmo3ForCausalLM`."""
    dense = read_olmo(config)
    thetas = {"full_attention": 5e5, "sliding_attention": 5e5}
    ropes = config.ropes_by_kind(dense.attention.head_dim, dense.model.max_position, thetas)
    window = config.size("sliding_window", 4096)
    windows = config.layer_windows(dense.num_layers, window, lambda index: (index + 1) % 4 > 0)
    attentions = (
        replace(
            dense.attention,
            window=layer_window,
            rope=ropes["full_attention" if layer_window is None else "sliding_attention"],
        )
        for layer_window in windows
    )
    layers = tuple(olmo_layer(dense, index, attention) for index, attention in enumerate(attentions))
    context = ropes["full_attention"].context(dense.model.max_position)
    return replace(dense.model, layers=layers, max_position=context)


def read_olmo(config: HFConfig) -> Dense:
    """Read what OLMo 2 and 3 share; the attention has no RoPE yet."""
    dense = read_dense(config, max_position=2048, norm_eps=1e-5, reads_rope=False)
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps, qk_norm_whole=True
    )
    return replace(dense, attention=attention)


def olmo_layer(dense: Dense, index: int, attention: AttentionSpec) -> LayerSpec:
    """A layer with a norm after each part, and none before."""
    return LayerSpec(
        name=f"model.layers.{index}",
        mixer=SubLayer(attention, None, dense.norm("post_attention_layernorm")),
        feed_forward=SubLayer(dense.mlp, None, dense.norm("post_feedforward_layernorm")),
    )
