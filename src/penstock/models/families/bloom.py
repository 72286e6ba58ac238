"""BLOOM, BLOOMZ: ALiBi instead of RoPE, layer norms, also of the embeddings, biases, MLPs without gates.

x = norm(embedding)
x += attention(norm(x))                         Wq, Wk and Wv are one matrix, by head
x += Wd gelu(Wu norm(x) + bu) + bd
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.position_bias import AlibiSpec
from penstock.layers.spec import NormSpec
from penstock.models.families.dense import check_heads, expect_decoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_NAMES = AttentionNames(qkv=("self_attention.query_key_value",), output="self_attention.dense")


def bloom_spec(config: HFConfig) -> ModelSpec:
    """Read a `BloomForCausalLM`."""
    expect_decoder(config)
    config.expect("apply_residual_connection_post_layernorm", False)
    config.ignore("slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion")
    config.ignore("skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "n_inner")
    hidden = config.find_size("n_embed") or config.size("hidden_size", 64)
    heads = config.find_size("num_attention_heads") or config.size("n_head", 8)
    num_layers = config.find_size("num_hidden_layers") or config.size("n_layer", 2)
    check_heads(hidden, heads, config)
    eps = config.positive("layer_norm_epsilon", 1e-5, or_zero=True)
    attention = replace(
        AttentionSpec.multi_head(hidden, heads),
        qkv_bias=True,
        output_bias=True,
        qkv_by_head=True,
        names=_NAMES,
    )
    mlp = PlainMLPSpec(
        hidden, 4 * hidden, bias=True, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", activation="gelu_tanh"
    )

    def norm(name: str) -> NormSpec:
        return NormSpec(name, hidden, eps, bias=True)

    mixer, feed_forward = SubLayer(attention, norm("input_layernorm")), SubLayer(mlp, norm("post_attention_layernorm"))
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 250880),
        hidden_size=hidden,
        max_position=config.size("seq_length", 2048),
        layers=tuple(LayerSpec(f"h.{index}", mixer, feed_forward) for index in range(num_layers)),
        final_norm=norm("ln_f"),
        tie_embeddings=config.get("tie_word_embeddings", True),
        position_bias=AlibiSpec(heads),
        embedding_norm=norm("word_embeddings_layernorm"),
        names=ModelNames("word_embeddings", prefixes=(("transformer.", ""),)),
    )
