"""GPT-2, DistilGPT-2, StarCoder: learned positions instead of RoPE, layer norms, biases, MLPs without gates.

x = embedding + position embedding
x += attention(norm(x))                         Wq, Wk and Wv are one matrix; GPT-2's matrices are stored transposed
x += Wd gelu(Wu norm(x) + bu) + bd
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import NormSpec
from penstock.models.families.dense import expect_decoder, read_activation
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer, TableSpec

_NAMES = AttentionNames(qkv=("attn.c_attn",), output="attn.c_proj")
_SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
"""Settings of a head that language models lack."""


def gpt2_spec(config: HFConfig) -> ModelSpec:
    """Read a `GPT2LMHeadModel`."""
    return _spec(config, "gelu_new", transposed=r".*\.(c_attn|c_proj|c_fc)\.weight")


def gpt_bigcode_spec(config: HFConfig) -> ModelSpec:
    """Read a `GPTBigCodeForCausalLM` (StarCoder, SantaCoder): all heads share one head of keys and values."""
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "pad_key_length")
    config.ignore(
        "num_key_value_heads", "pre_allocate_kv_cache", "max_sequence_length", "max_batch_size", "validate_runner_input"
    )
    model = _spec(config, "gelu_pytorch_tanh", transposed=None)
    shared = config.get("multi_query", True)

    def with_keys(layer: LayerSpec) -> LayerSpec:
        assert layer.mixer is not None
        attention = layer.mixer.part
        assert isinstance(attention, AttentionSpec)
        attention = replace(attention, num_kv_heads=1) if shared else replace(attention, qkv_by_head=True)
        return replace(layer, mixer=replace(layer.mixer, part=attention))

    return replace(model, layers=tuple(map(with_keys, model.layers)))


def _spec(config: HFConfig, activation: str, transposed: str | None) -> ModelSpec:
    config.ignore(*_SUMMARY, "n_ctx", "reorder_and_upcast_attn")
    expect_decoder(config)
    hidden, context = config.size("n_embd", 768), config.size("n_positions", 1024)
    eps = config.positive("layer_norm_epsilon", 1e-5, or_zero=True)
    mlp = PlainMLPSpec(
        hidden,
        config.size("n_inner", 4 * hidden),
        bias=True,
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation=read_activation(config, "activation_function", activation),
    )
    norms = [NormSpec(name, hidden, eps, bias=True) for name in ("ln_1", "ln_2", "transformer.ln_f")]
    num_layers = config.size("n_layer", 12)
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 50257),
        hidden_size=hidden,
        max_position=context,
        layers=tuple(
            LayerSpec(f"transformer.h.{index}", SubLayer(attention, norms[0]), SubLayer(mlp, norms[1]))
            for index, attention in enumerate(_attentions(config, hidden, num_layers))
        ),
        final_norm=norms[2],
        tie_embeddings=config.get("tie_word_embeddings", True),
        positions=TableSpec("transformer.wpe", context),
        names=ModelNames(
            "transformer.wte",
            ignored=(r".*\.attn\.(bias|masked_bias)",),  # causal masks
            prefixes=tuple((name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")),
            transposed=transposed,
        ),
    )


def _attentions(config: HFConfig, hidden_size: int, num_layers: int) -> list[AttentionSpec]:
    heads = config.size("n_head", 12)
    if hidden_size % heads:
        raise config.unsupported("n_head", heads, (f"a divisor of n_embd {hidden_size}",))
    plain = AttentionSpec.multi_head(hidden_size, heads)
    attention = replace(plain, qkv_bias=True, output_bias=True, names=_NAMES)
    scale = plain.scale if config.get("scale_attn_weights", True) else 1.0
    falls = config.get("scale_attn_by_inverse_layer_idx", False)
    return [replace(attention, scale=scale / (index + 1) if falls else scale) for index in range(num_layers)]
