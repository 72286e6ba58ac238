"""DeBERTa v2 and v3: Bert whose scores also depend on the distance of key and query, by their content.

x = norm(embedding)                             layer norms with biases; no positions
x = norm(x + attention(x))                      every token attends to all others
x = norm(x + Wd gelu(Wu x))                     v2: after the first layer, norm(x + gelu(convolution(embedding)))
"""

from penstock.checkpoint.encoder_config import HeadActivation
from penstock.layers.convolution import TokenConvolutionSpec
from penstock.layers.disentangled import DisentangledSpec, DistanceSpec
from penstock.layers.encoder_head import DenseSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.models.families.bert import activation_of, is_classifier, layer_norm, num_labels, post_norm_layers
from penstock.models.families.dense import check_heads
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, HeadPart, ModelNames, ModelSpec, TableSpec

_TERMS = ("c2p", "p2c")
_MOST_WIDTH = 15
_ACTIVATIONS: dict[str, HeadActivation] = {"gelu": "gelu", "relu": "relu", "tanh": "tanh"}


def deberta_v2_spec(config: HFConfig) -> ModelSpec:
    """Read a `DebertaV2Model`, `DebertaV2ForMaskedLM` or `DebertaV2ForSequenceClassification`."""
    config.ignore(
        "hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings", "gradient_checkpointing"
    )
    config.ignore("pooler_dropout", "cls_dropout", "legacy", "max_length", "sbert_ce_default_activation_function")
    config.ignore("sentence_transformers", "pooler_hidden_act", "pooler_hidden_size")  # read for classifiers
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    check_heads(hidden, heads, config)
    config.expect("embedding_size", hidden, None)
    config.expect("attention_head_size", hidden // heads, None)
    eps, positions = config.positive("layer_norm_eps", 1e-7), config.size("max_position_embeddings", 512)
    distances = _distances(config, hidden, positions, eps)
    attention = _attention(config, hidden, heads, 2 * distances.span)
    mlp = PlainMLPSpec(
        hidden,
        config.size("intermediate_size"),
        bias=True,
        up="intermediate.dense",
        down="output.dense",
        activation=activation_of(config, "hidden_act"),
    )
    num_layers, is_scored = config.size("num_hidden_layers"), is_classifier(config)
    layers, final_norm = post_norm_layers(
        "deberta.encoder.layer",
        num_layers,
        attention,
        mlp,
        ("attention.output.LayerNorm", "output.LayerNorm"),
        eps,
    )
    has_positions, types = config.get("position_biased_input", True), config.size("type_vocab_size", 0, least=0)
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 128100),
        hidden_size=hidden,
        max_position=positions,
        layers=layers,
        final_norm=final_norm,
        names=ModelNames(
            embedding="deberta.embeddings.word_embeddings",
            ignored=(
                *(r".*position_ids", r"(cls|lm_predictions|mask_predictions|pooler|classifier)\..*"),
                *(() if has_positions else (r"deberta\.embeddings\.position_embeddings\..*",)),
            ),
            prefixes=tuple((name, f"deberta.{name}") for name in ("embeddings.", "encoder.")),
        ),
        encoder=EncoderSpec(
            hidden_size=hidden,
            positions=TableSpec("deberta.embeddings.position_embeddings", positions) if has_positions else None,
            token_types=TableSpec("deberta.embeddings.token_type_embeddings", types) if types else None,
            norm=layer_norm("deberta.embeddings.LayerNorm", hidden, eps),
            distances=distances,
            convolution=_convolution(config, hidden, num_layers, eps),
            pooling=("cls",) if is_scored else ("mean",),
            head=_head(config, hidden) if is_scored else (),
        ),
    )


def _distances(config: HFConfig, hidden: int, positions: int, eps: float) -> DistanceSpec:
    if not config.get("relative_attention", False):
        raise config.unsupported("relative_attention", False, (True,))
    span = config.size("max_relative_positions", -1, least=-1)
    span = span if span > 0 else positions
    num_buckets, max_distance = config.size("position_buckets", -1, least=-1), None
    if num_buckets > 0:
        span, max_distance = num_buckets, span
        if span < 4 or max_distance <= span // 2 + 1:
            wanted = (f"an even number from 4 on, less than twice max_relative_positions, {max_distance}",)
            raise config.unsupported("position_buckets", num_buckets, wanted)
    config.expect("norm_rel_ebd", "none", "layer_norm")
    is_normed = config.get("norm_rel_ebd", "none") == "layer_norm"
    norm = layer_norm("deberta.encoder.LayerNorm", hidden, eps) if is_normed else None
    return DistanceSpec("deberta.encoder.rel_embeddings", hidden, span, max_distance, norm)


def _attention(config: HFConfig, hidden: int, heads: int, num_buckets: int) -> DisentangledSpec:
    if config.is_list("pos_att_type"):
        terms = [str(term) for term in config.need("pos_att_type", list)]
    else:
        terms = [term.strip() for term in config.get("pos_att_type", "").lower().split("|") if term.strip()]
    for term in terms:
        if term not in _TERMS:
            raise config.unsupported("pos_att_type", term, _TERMS)
    return DisentangledSpec(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=hidden // heads,
        scale=float((hidden // heads * (1 + len({*terms}))) ** -0.5),
        num_buckets=num_buckets,
        has_keys="c2p" in terms,
        has_queries="p2c" in terms,
        shares_projections=config.get("share_att_key", False),
    )


def _convolution(config: HFConfig, hidden: int, num_layers: int, eps: float) -> TokenConvolutionSpec | None:
    width = config.size("conv_kernel_size", 0, least=0)
    if not width:
        config.ignore("conv_act", "conv_groups")
        return None
    if width % 2 == 0 or width > _MOST_WIDTH or num_layers < 2:
        known = (f"an odd number up to {_MOST_WIDTH}, in a model of several layers",)
        raise config.unsupported("conv_kernel_size", width, known)
    config.expect("conv_groups", 1)
    config.expect("conv_act", "tanh", *_ACTIVATIONS)
    activation = _ACTIVATIONS[config.get("conv_act", "tanh")]
    norm = layer_norm("deberta.encoder.conv.LayerNorm", hidden, eps)
    return TokenConvolutionSpec("deberta.encoder.conv.conv", hidden, width, activation, norm)


def _head(config: HFConfig, hidden: int) -> tuple[HeadPart, ...]:
    config.expect("pooler_hidden_act", "gelu", *_ACTIVATIONS)
    config.expect("pooler_hidden_size", hidden, None)
    activation = _ACTIVATIONS[config.get("pooler_hidden_act", "gelu")]
    return (
        DenseSpec("pooler.dense", hidden, hidden, True, activation),
        DenseSpec("classifier", hidden, num_labels(config), True),
    )
