"""GPT-J (6B): attention and MLP side by side, layer norms, interleaved RoPE on a part of each head.

n = norm(x)                                     one norm for both parts: a layer norm with a bias
x += attention(n) + Wd gelu(Wu n + bu) + bd     RoPE turns elements 2 i and 2 i + 1 of the first `rotary_dim` together

logits = W norm(x) + b
"""

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.dense import check_rotation, read_activation
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_NAMES = AttentionNames(qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"), output="attn.out_proj")


def gptj_spec(config: HFConfig) -> ModelSpec:
    """Read a `GPTJForCausalLM`."""
    config.ignore(
        "n_ctx",
        "rotary",
        "scale_attn_weights",
        "gradient_checkpointing",
        *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
    )
    config.expect("is_encoder_decoder", False)
    hidden, context, heads = config.size("n_embd", 4096), config.size("n_positions", 2048), config.size("n_head", 16)
    if hidden % heads:
        raise config.unsupported("n_head", heads, (f"a divisor of n_embd {hidden}",))
    head_dim = hidden // heads
    rope = RopeConfig(config.size("rotary_dim", 64), original_max_position=context)
    check_rotation(rope, head_dim, config)
    attention = AttentionSpec(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        interleaved_rope=True,
        names=_NAMES,
    )
    mlp = PlainMLPSpec(
        hidden,
        config.size("n_inner", 4 * hidden),
        bias=True,
        up="mlp.fc_in",
        down="mlp.fc_out",
        activation=read_activation(config, "activation_function", "gelu_new"),
    )
    eps = config.positive("layer_norm_epsilon", 1e-5, or_zero=True)
    mixer = SubLayer(attention, NormSpec("ln_1", hidden, eps, bias=True))
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 50400),
        hidden_size=hidden,
        max_position=context,
        layers=tuple(
            LayerSpec(f"transformer.h.{index}", mixer, SubLayer(mlp, None), parallel=True)
            for index in range(config.size("n_layer", 28))
        ),
        final_norm=NormSpec("transformer.ln_f", hidden, eps, bias=True),
        tie_embeddings=config.get("tie_word_embeddings", False),
        output_bias=True,
        names=ModelNames("transformer.wte", ignored=(r".*\.attn\.(bias|masked_bias|embed_positions)",)),
    )
