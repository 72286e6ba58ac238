"""Falcon (7B, 40B, 180B): attention and MLP side by side, layer norms, one matrix of queries, keys and values.

x += attention(norm(x)) + Wd gelu(Wu norm(x))   one layer norm with a bias for both parts; 40B and 180B: two

7B has one head of keys. In 40B and 180B each head of keys and values stands after its queries in the matrix.
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames
from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.dense import Dense, check_heads, read_activation, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_NAMES = AttentionNames(qkv=("self_attention.query_key_value",), output="self_attention.dense")


def falcon_spec(config: HFConfig) -> ModelSpec:
    """Read a `FalconForCausalLM`."""
    config.expect("alibi", False)
    grouped, multi_query = config.get("new_decoder_architecture", False), config.get("multi_query", True)
    dense = _dense(config, grouped=grouped, multi_query=multi_query)
    bias = config.get("bias", False)
    attention = replace(
        dense.attention,
        qkv_bias=bias,
        output_bias=bias,
        qkv_by_head=grouped or not multi_query,
        names=_NAMES,
    )
    mlp = PlainMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        bias,
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
        read_activation(config, "activation", "gelu"),
    )
    parallel = config.get("parallel_attn", True)
    if grouped:
        config.expect("parallel_attn", True)
    before, between = _norms(config, grouped=grouped, parallel=parallel)
    mixer = SubLayer(attention, dense.norm(before))
    feed_forward = SubLayer(mlp, None if between is None else dense.norm(between))
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(f"transformer.h.{index}", mixer, feed_forward, parallel=parallel)
            for index in range(dense.num_layers)
        ),
        final_norm=dense.norm("transformer.ln_f"),
        names=ModelNames("transformer.word_embeddings", ignored=(r".*\.rotary(_emb)?\.inv_freq",)),
    )


def _dense(config: HFConfig, *, grouped: bool, multi_query: bool) -> Dense:
    hidden, heads = config.size("hidden_size", 4544), config.size("num_attention_heads", 71)
    of_keys = config.size("num_kv_heads", heads)
    of_keys = of_keys if grouped else 1 if multi_query else heads
    check_heads(heads, of_keys, config)
    dense = read_dense(
        config,
        max_position=2048,
        num_layers=32,
        num_heads=71,
        vocab_size=65024,
        intermediate_size=config.size("ffn_hidden_size", 4 * hidden),
        norm_eps=1e-5,
        norm_eps_key="layer_norm_epsilon",
        norm_bias=True,
        tied=True,
        activation=None,
        reads_mlp=False,
    )
    return replace(dense, attention=replace(dense.attention, num_kv_heads=of_keys))


def _norms(config: HFConfig, *, grouped: bool, parallel: bool) -> tuple[str, str | None]:
    """Names of the norms before the attention and before the MLP; None: the MLP shares the first."""
    config.expect("num_ln_in_parallel_attn", None, 1, *((2,) if grouped else ()))
    if not parallel:
        return "input_layernorm", "post_attention_layernorm"
    if grouped and config.find("num_ln_in_parallel_attn", int) != 1:
        return "ln_attn", "ln_mlp"
    return "input_layernorm", None
