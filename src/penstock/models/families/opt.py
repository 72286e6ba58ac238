"""OPT, Galactica: learned positions instead of RoPE, layer norms, biases, MLPs without gates.

x = embedding + position embedding              the first two rows of the positions' table are not used
x += attention(norm(x))
x += Wd relu(Wu norm(x) + bu) + bd              Galactica has gelu and no biases
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainActivation, PlainMLPSpec
from penstock.layers.spec import NormSpec
from penstock.models.families.dense import ACTIVATIONS, check_heads, expect_decoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer, TableSpec

_EPS = 1e-5
_UNUSED_ROWS = 2
_ACTIVATIONS: dict[str, PlainActivation] = {"relu": "relu", **ACTIVATIONS}


def opt_spec(config: HFConfig) -> ModelSpec:
    """Read an `OPTForCausalLM`; the layout of OPT-350M, whose norms follow the sums, is refused."""
    expect_decoder(config)
    config.expect("do_layer_norm_before", True)
    config.expect("_remove_final_layer_norm", False)
    config.ignore("dropout", "layerdrop", "activation_dropout", "init_std", "output_projection")
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    check_heads(hidden, heads, config)
    config.expect("word_embed_proj_dim", hidden, None)
    config.expect("activation_function", *_ACTIVATIONS)
    bias, weighted = config.get("enable_bias", True), config.get("layer_norm_elementwise_affine", True)
    attention = replace(
        AttentionSpec.multi_head(hidden, heads),
        qkv_bias=bias,
        output_bias=bias,
        names=AttentionNames(output="self_attn.out_proj"),
    )
    mlp = PlainMLPSpec(
        hidden,
        config.size("ffn_dim", 3072),
        bias=bias,
        up="fc1",
        down="fc2",
        activation=_ACTIVATIONS[config.get("activation_function", "relu")],
    )

    def norm(name: str) -> NormSpec:
        return NormSpec(name, hidden, _EPS, bias=weighted, centred=True, weighted=weighted)

    mixer, feed_forward = SubLayer(attention, norm("self_attn_layer_norm")), SubLayer(mlp, norm("final_layer_norm"))
    context, num_layers = config.size("max_position_embeddings", 2048), config.size("num_hidden_layers", 12)
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 50272),
        hidden_size=hidden,
        max_position=context,
        layers=tuple(LayerSpec(f"model.decoder.layers.{index}", mixer, feed_forward) for index in range(num_layers)),
        final_norm=norm("model.decoder.final_layer_norm"),
        tie_embeddings=config.get("tie_word_embeddings", True),
        positions=TableSpec("model.decoder.embed_positions", context + _UNUSED_ROWS, first=_UNUSED_ROWS),
        names=ModelNames("model.decoder.embed_tokens", prefixes=(("decoder.", "model.decoder."),)),
    )
