"""Jina embeddings v2: Bert with ALiBi to both sides instead of positions, and gated MLPs.

x = norm(embedding + token type)                layer norms with biases
x = norm(x + attention(x))                      every token attends to all others, less the further away it is
x = norm(x + Wd (gelu(Wg x) * Wu x) + bd)       Wg and Wu are one matrix
"""

from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.position_bias import AlibiSpec
from penstock.models.families.bert import (
    BERT_NAMES,
    bert_head,
    bidirectional_attention,
    is_classifier,
    layer_norm,
    post_norm_layers,
)
from penstock.models.families.dense import check_heads
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, ModelNames, ModelSpec, TableSpec


def jina_bert_spec(config: HFConfig) -> ModelSpec:
    """Read a `JinaBertModel`, `JinaBertForMaskedLM` or `JinaBertForSequenceClassification`, whose code is not run."""
    if config.get("position_embedding_type", "absolute") != "alibi":
        raise config.unsupported(
            "position_embedding_type", config.get("position_embedding_type", "absolute"), ("alibi",)
        )
    if config.get("feed_forward_type", "original") != "geglu":
        raise config.unsupported("feed_forward_type", config.get("feed_forward_type", "original"), ("geglu",))
    config.expect("hidden_act", "gelu")
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    config.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")
    config.ignore("gradient_checkpointing", "emb_pooler", "attn_implementation", "model_max_length")
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    check_heads(hidden, heads, config)
    eps, is_scored = config.positive("layer_norm_eps", 1e-12), is_classifier(config)
    mlp = GatedMLPSpec(
        hidden,
        config.size("intermediate_size", 3072),
        down_bias=True,
        activation="gelu",
        gate_up=("mlp.gated_layers",),
        down="mlp.wo",
    )
    layers, final_norm = post_norm_layers(
        "bert.encoder.layer",
        config.size("num_hidden_layers", 12),
        bidirectional_attention(hidden, heads, BERT_NAMES),
        mlp,
        ("attention.output.LayerNorm", "mlp.layernorm"),
        eps,
    )
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 30528),
        hidden_size=hidden,
        max_position=config.size("max_position_embeddings", 8192),
        layers=layers,
        final_norm=final_norm,
        position_bias=AlibiSpec(heads),
        names=ModelNames(
            embedding="bert.embeddings.word_embeddings",
            ignored=(r".*position_ids", r"bert\.encoder\.alibi", r"bert\.pooler\..*", r"cls\..*", r"classifier\..*"),
            prefixes=tuple((f"{name}.", f"bert.{name}.") for name in ("embeddings", "encoder", "pooler")),
        ),
        encoder=EncoderSpec(
            hidden_size=hidden,
            token_types=TableSpec("bert.embeddings.token_type_embeddings", config.size("type_vocab_size", 2)),
            norm=layer_norm("bert.embeddings.LayerNorm", hidden, eps),
            pooling=("cls",) if is_scored else ("mean",),
            head=bert_head(config) if is_scored else (),
        ),
    )
