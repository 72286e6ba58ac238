"""DistilBert: Bert with other names and without token types.

x = norm(embedding + position)                  layer norms with biases
x = norm(x + attention(x))                      every token attends to all others
x = norm(x + Wd gelu(Wu x))
"""

from penstock.layers.attention import AttentionNames
from penstock.layers.encoder_head import DenseSpec
from penstock.layers.mlp import PlainMLPSpec
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

_EPS = 1e-12
_NAMES = AttentionNames(qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"), output="attention.out_lin")


def distilbert_spec(config: HFConfig) -> ModelSpec:
    """Read a `DistilBertModel`, `DistilBertForMaskedLM` or `DistilBertForSequenceClassification`."""
    config.ignore("dropout", "qa_dropout", "seq_classif_dropout", "tie_word_embeddings", "tie_weights_")
    config.ignore("sinusoidal_pos_embds")  # which positions are at first, before training
    config.ignore("sentence_transformers", "sbert_ce_default_activation_function")
    hidden, heads, num_layers = config.size("dim", 768), config.size("n_heads", 12), config.size("n_layers", 6)
    check_heads(hidden, heads, config)
    positions, is_scored = config.size("max_position_embeddings", 512), is_classifier(config)
    mlp = PlainMLPSpec(
        hidden,
        config.size("hidden_dim", 3072),
        bias=True,
        up="ffn.lin1",
        down="ffn.lin2",
        activation=activation_of(config, "activation"),
    )
    attention = bidirectional_attention(hidden, heads, _NAMES)
    layers, final_norm = post_norm_layers(
        "distilbert.transformer.layer", num_layers, attention, mlp, ("sa_layer_norm", "output_layer_norm"), _EPS
    )
    head = (
        DenseSpec("pre_classifier", hidden, hidden, True, "relu"),
        DenseSpec("classifier", hidden, num_labels(config), True),
    )
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 30522),
        hidden_size=hidden,
        max_position=positions,
        layers=layers,
        final_norm=final_norm,
        names=ModelNames(
            embedding="distilbert.embeddings.word_embeddings",
            ignored=(r".*position_ids", r"vocab_.*", r"(pre_)?classifier\..*"),
            prefixes=tuple((name, f"distilbert.{name}") for name in ("embeddings.", "transformer.")),
        ),
        encoder=EncoderSpec(
            hidden_size=hidden,
            positions=TableSpec("distilbert.embeddings.position_embeddings", positions),
            norm=layer_norm("distilbert.embeddings.LayerNorm", hidden, _EPS),
            pooling=("cls",) if is_scored else ("mean",),
            head=head if is_scored else (),
        ),
    )
