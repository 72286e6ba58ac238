"""MPT: ALiBi instead of RoPE, layer norms without biases, no biases at all, MLPs without gates.

x += attention(norm(x))                         Wq, Wk and Wv are one matrix; q, k and v may be limited to `clip_qkv`
x += Wd gelu(Wu norm(x))
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.position_bias import AlibiSpec
from penstock.layers.spec import NormSpec
from penstock.models.families.dense import check_heads, expect_decoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_NAMES = AttentionNames(qkv=("attn.Wqkv",), output="attn.out_proj")
_NORMS = ("low_precision_layernorm", "layernorm")
_STEEPEST = 64.0


def mpt_spec(config: HFConfig) -> ModelSpec:
    """Read an `MptForCausalLM`, or an `MPTForCausalLM` with its own code, which is not run."""
    expect_decoder(config)
    config.expect("no_bias", True)
    config.expect("logit_scale", None)
    config.expect("expansion_ratio", 4)
    config.expect("norm_type", *_NORMS)
    config.ignore("learned_pos_emb", "embedding_fraction", "init_device", "init_config", "verbose", "tokenizer_name")
    config.ignore("emb_pdrop", "max_position_embeddings")
    hidden, heads, num_layers = config.size("d_model", 2048), config.size("n_heads", 16), config.size("n_layers", 24)
    check_heads(hidden, heads, config)
    eps = config.positive("layer_norm_epsilon", 1e-5, or_zero=True)
    attention, bias = _attention(config.section(config.get("attn_config", {}), "attn_config"), hidden, heads)
    mlp = PlainMLPSpec(hidden, 4 * hidden, up="ffn.up_proj", down="ffn.down_proj", activation="gelu")

    def norm(name: str) -> NormSpec:
        return NormSpec(name, hidden, eps, centred=True)

    mixer, feed_forward = SubLayer(attention, norm("norm_1")), SubLayer(mlp, norm("norm_2"))
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 50368),
        hidden_size=hidden,
        max_position=config.size("max_seq_len", 2048),
        layers=tuple(LayerSpec(f"transformer.blocks.{index}", mixer, feed_forward) for index in range(num_layers)),
        final_norm=norm("transformer.norm_f"),
        tie_embeddings=config.get("tie_word_embeddings", True),
        position_bias=bias,
        names=ModelNames("transformer.wte"),
    )


def _attention(config: HFConfig, hidden: int, heads: int) -> tuple[AttentionSpec, AlibiSpec]:
    expect_decoder(config)
    config.expect("attn_type", "multihead_attention")
    config.expect("prefix_lm", False)
    config.expect("qk_ln", False)
    config.expect("attn_uses_sequence_id", False)
    config.expect("alibi", True)
    config.ignore("attn_impl")
    steepness, head_dim = config.positive("alibi_bias_max", 8.0), hidden // heads
    if steepness > _STEEPEST:
        raise config.unsupported("alibi_bias_max", steepness, (f"numbers up to {_STEEPEST:g}",))
    clip = config.positive("clip_qkv", 1.0) if config.has("clip_qkv") else None
    config.ignore("clip_qkv")
    attention = replace(
        AttentionSpec.multi_head(hidden, heads),
        scale=config.positive("softmax_scale", head_dim**-0.5),
        qkv_clip=clip,
        names=_NAMES,
    )
    return attention, AlibiSpec(heads, steepness)
