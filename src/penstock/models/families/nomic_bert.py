"""NomicBert: Bert with RoPE instead of learned positions, and gated MLPs without biases.

x = norm(embedding + token type)                layer norms with biases
x = norm(x + attention(x))                      with RoPE; every token attends to all others
x = norm(x + mlp(x))
"""

from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.models.families.bert import layer_norm, post_norm_layers
from penstock.models.families.dense import check_heads, check_rotation
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, ModelNames, ModelSpec, TableSpec


def nomic_bert_spec(config: HFConfig) -> ModelSpec:
    """Read a `NomicBertModel`."""
    config.expect("hidden_act", "silu")
    config.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    head_dim, max_position = config.size("head_dim", hidden // heads), config.size("max_position_embeddings", 2048)
    check_heads(hidden, heads, config)
    eps = config.positive("layer_norm_eps", 1e-12)
    rope = config.rope(head_dim, max_position, theta=1000.0)
    check_rotation(rope, head_dim, config)
    attention = AttentionSpec(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        bidirectional=True,
        names=AttentionNames(qkv=("attn.Wqkv",), output="attn.out_proj"),
    )
    mlp = GatedMLPSpec(hidden, config.size("intermediate_size", 3072), gate_up=("mlp.fc12", "mlp.fc11"), down="mlp.fc2")
    num_layers = config.size("num_hidden_layers", 12)
    layers, final_norm = post_norm_layers("encoder.layers", num_layers, attention, mlp, ("norm1", "norm2"), eps)
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 30528),
        hidden_size=hidden,
        max_position=rope.context(max_position),
        layers=layers,
        final_norm=final_norm,
        names=ModelNames(embedding="embeddings.word_embeddings", ignored=(r"pooler\..*", r"cls\..*")),
        encoder=EncoderSpec(
            hidden_size=hidden,
            token_types=TableSpec("embeddings.token_type_embeddings", config.size("type_vocab_size", 2)),
            norm=layer_norm("emb_ln", hidden, eps),
        ),
    )
