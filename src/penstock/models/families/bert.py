"""Bert, Roberta, Camembert, Electra: post-norm, learned positions, biases everywhere, bidirectional attention.

x = norm(embedding + position + token type)     layer norms with biases; Electra projects the sum to the layers' size
x = norm(x + attention(x))                      every token attends to all others
x = norm(x + Wd gelu(Wu x))
"""

from dataclasses import replace

from penstock.config.feed_forward import Activation
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.disentangled import DisentangledSpec
from penstock.layers.encoder_head import DenseSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.spec import FeedForwardSpec, NormSpec
from penstock.models.families.dense import check_heads
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, HeadPart, LayerSpec, ModelNames, ModelSpec, SubLayer, TableSpec

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
BERT_NAMES = AttentionNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"), output="attention.output.dense"
)


def bert_spec(config: HFConfig) -> ModelSpec:
    """Read a `BertModel`, or a `BertForSequenceClassification`."""
    return _spec(config, "bert", padding=None, head=bert_head(config))


def xlm_roberta_spec(config: HFConfig) -> ModelSpec:
    """Read a `XLMRobertaModel`, `RobertaModel` or `CamembertModel`, or one of their `ForSequenceClassification`."""
    hidden = config.size("hidden_size")
    head = (
        DenseSpec("classifier.dense", hidden, hidden, True, "tanh"),
        DenseSpec("classifier.out_proj", hidden, num_labels(config), True),
    )
    return _spec(config, "roberta", padding=config.size("pad_token_id", 1, least=-1), head=head)


def electra_spec(config: HFConfig) -> ModelSpec:
    """Read an `ElectraModel`, or an `ElectraForSequenceClassification`."""
    config.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    hidden, embedding = config.size("hidden_size"), config.size("embedding_size", 128)
    head = (
        DenseSpec("classifier.dense", hidden, hidden, True, "gelu"),
        DenseSpec("classifier.out_proj", hidden, num_labels(config), True),
    )
    projection = None if embedding == hidden else DenseSpec("electra.embeddings_project", embedding, hidden, True)
    return _spec(config, "electra", padding=None, head=head, projection=projection)


def bert_head(config: HFConfig) -> tuple[HeadPart, ...]:
    """The pooler, of the first token, and the classifier."""
    hidden = config.size("hidden_size")
    return (
        DenseSpec("bert.pooler.dense", hidden, hidden, True, "tanh"),
        DenseSpec("classifier", hidden, num_labels(config), True),
    )


def num_labels(config: HFConfig) -> int:
    """Number of a classifier's outputs: `num_labels`, or the number of entries of `id2label`."""
    labels = config.find("id2label", dict)
    return len(labels) if labels else config.size("num_labels", 2)


def is_classifier(config: HFConfig) -> bool:
    """Whether the checkpoint has a classification head."""
    return any("ForSequenceClassification" in str(name) for name in config.find("architectures", list) or [])


def _spec(
    config: HFConfig,
    prefix: str,
    *,
    padding: int | None,
    head: tuple[HeadPart, ...],
    projection: DenseSpec | None = None,
) -> ModelSpec:
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    config.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")
    config.ignore("pad_token_id", "gradient_checkpointing", "output_past", "directionality")
    config.ignore(*(f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "type")))
    config.ignore("pooler_size_per_head", "sentence_transformers", "sbert_ce_default_activation_function")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    check_heads(hidden, heads, config)
    eps, positions = config.positive("layer_norm_eps", 1e-12), config.size("max_position_embeddings", 512)
    is_scored, num_layers = is_classifier(config), config.size("num_hidden_layers")
    mlp = PlainMLPSpec(
        hidden,
        config.size("intermediate_size"),
        bias=True,
        up="intermediate.dense",
        down="output.dense",
        activation=activation_of(config, "hidden_act"),
    )
    layers, final_norm = post_norm_layers(
        f"{prefix}.encoder.layer",
        num_layers,
        bidirectional_attention(hidden, heads, BERT_NAMES),
        mlp,
        ("attention.output.LayerNorm", "output.LayerNorm"),
        eps,
    )
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        max_position=positions if padding is None else positions - padding - 1,
        layers=layers,
        final_norm=final_norm,
        names=ModelNames(
            embedding=f"{prefix}.embeddings.word_embeddings",
            ignored=(
                *(r".*position_ids", rf"{prefix}\.pooler\..*", r"cls\..*", r"lm_head\..*", r"classifier\..*"),
                r"(generator|discriminator)_.*",
            ),
            prefixes=tuple(
                (f"{name}.", f"{prefix}.{name}.") for name in ("embeddings", "embeddings_project", "encoder", "pooler")
            ),
        ),
        encoder=EncoderSpec(
            hidden_size=hidden,
            positions=TableSpec(f"{prefix}.embeddings.position_embeddings", positions, padding),
            token_types=TableSpec(f"{prefix}.embeddings.token_type_embeddings", config.size("type_vocab_size", 2)),
            norm=layer_norm(f"{prefix}.embeddings.LayerNorm", projection.in_size if projection else hidden, eps),
            projection=projection,
            pooling=("cls",) if is_scored else ("mean",),
            head=head if is_scored else (),
        ),
    )


def layer_norm(name: str, size: int, eps: float, *, bias: bool = True) -> NormSpec:
    """A layer norm (which subtracts the mean)."""
    return NormSpec(name, size, eps, bias=bias, centred=True)


def post_norm_layers(
    prefix: str,
    count: int,
    attention: AttentionSpec | DisentangledSpec,
    mlp: FeedForwardSpec,
    norms: tuple[str, str],
    eps: float,
) -> tuple[tuple[LayerSpec, ...], NormSpec]:
    """`count` layers with a norm after each sum, and the model's final norm, which is the last layer's second one.

    Args:
        norms: names in a layer of the norm after the attention, and after the MLP.
    """
    first, second = (layer_norm(name, attention.hidden_size, eps) for name in norms)
    layer = LayerSpec(prefix, SubLayer(attention, None, norm_of_sum=first), SubLayer(mlp, None, norm_of_sum=second))
    last = replace(layer, name=f"{prefix}.{count - 1}", feed_forward=SubLayer(mlp, None))
    others = (replace(layer, name=f"{prefix}.{index}") for index in range(count - 1))
    return (*others, last), replace(second, name=f"{last.name}.{second.name}")


def bidirectional_attention(hidden: int, heads: int, names: AttentionNames) -> AttentionSpec:
    """Attention to both sides with biases and without RoPE."""
    return replace(
        AttentionSpec.multi_head(hidden, heads),
        qkv_bias=True,
        output_bias=True,
        bidirectional=True,
        names=names,
    )


def activation_of(config: HFConfig, key: str) -> Activation:
    """The activation that `key` names; gelu if it is absent."""
    config.expect(key, "gelu", *ACTIVATIONS)
    return ACTIVATIONS[config.get(key, "gelu")]
