"""MPNet: Roberta without token types, and with a learned bias on scores by the distance of key and query.

x = norm(embedding + position)                  layer norms with biases
x = norm(x + attention(x))                      every token attends to all others
x = norm(x + Wd gelu(Wu x))
"""

from penstock.layers.attention import AttentionNames
from penstock.layers.encoder_head import DenseSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.position_bias import PositionBiasSpec
from penstock.models.families.bert import (
    activation_of,
    bidirectional_attention,
    is_classifier,
    layer_norm,
    num_labels,
    post_norm_layers,
)
from penstock.models.families.dense import check_heads
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, ModelNames, ModelSpec, TableSpec

_NAMES = AttentionNames(qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), output="attention.attn.o")
_PADDING = 1
"""Of tokens and positions, whatever `pad_token_id` says."""


def mpnet_spec(config: HFConfig) -> ModelSpec:
    """Read an `MPNetModel`, `MPNetForMaskedLM` or `MPNetForSequenceClassification`."""
    config.expect("relative_attention_num_buckets", 32)
    config.ignore(
        "hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings", "gradient_checkpointing"
    )
    config.ignore("sentence_transformers", "sbert_ce_default_activation_function")
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    check_heads(hidden, heads, config)
    eps, num_layers = config.positive("layer_norm_eps", 1e-12), config.size("num_hidden_layers", 12)
    positions, is_scored = config.size("max_position_embeddings", 512), is_classifier(config)
    mlp = PlainMLPSpec(
        hidden,
        config.size("intermediate_size", 3072),
        bias=True,
        up="intermediate.dense",
        down="output.dense",
        activation=activation_of(config, "hidden_act"),
    )
    attention = bidirectional_attention(hidden, heads, _NAMES)
    layers, final_norm = post_norm_layers(
        "mpnet.encoder.layer", num_layers, attention, mlp, ("attention.LayerNorm", "output.LayerNorm"), eps
    )
    head = (
        DenseSpec("classifier.dense", hidden, hidden, True, "tanh"),
        DenseSpec("classifier.out_proj", hidden, num_labels(config), True),
    )
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 30527),
        hidden_size=hidden,
        max_position=positions - _PADDING - 1,
        layers=layers,
        final_norm=final_norm,
        names=ModelNames(
            embedding="mpnet.embeddings.word_embeddings",
            ignored=(r".*position_ids", r"mpnet\.pooler\..*", r"lm_head\..*", r"classifier\..*"),
            prefixes=tuple((name, f"mpnet.{name}") for name in ("embeddings.", "encoder.", "pooler.")),
        ),
        position_bias=PositionBiasSpec("mpnet.encoder.relative_attention_bias", heads),
        encoder=EncoderSpec(
            hidden_size=hidden,
            positions=TableSpec("mpnet.embeddings.position_embeddings", positions, _PADDING),
            norm=layer_norm("mpnet.embeddings.LayerNorm", hidden, eps),
            pooling=("cls",) if is_scored else ("mean",),
            head=head if is_scored else (),
        ),
    )
