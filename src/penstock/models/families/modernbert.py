"""ModernBert: pre-norm, gated MLPs, RoPE; a bidirectional sliding window in two of three layers.

x = norm(embedding)                             layer norms; the first layer has none before its attention
x += attention(norm(x))                         both ways; two of three layers over `local_attention` keys
x += mlp(norm(x))                               gelu for silu
"""

from collections.abc import Iterator

from penstock.checkpoint.encoder_config import Pooling
from penstock.layers.attention import AttentionNames, AttentionSpec
from penstock.layers.encoder_head import DenseSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.bert import activation_of, is_classifier, layer_norm, num_labels
from penstock.models.families.dense import check_heads
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, HeadPart, LayerSpec, ModelNames, ModelSpec, SubLayer

_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}


def modernbert_spec(config: HFConfig) -> ModelSpec:
    """Read a `ModernBertModel`, `ModernBertForMaskedLM` or `ModernBertForSequenceClassification`."""
    config.ignore("embedding_dropout", "mlp_dropout", "classifier_dropout", "initializer_cutoff_factor", "decoder_bias")
    config.ignore("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index", "cls_token_id")
    config.ignore("reference_compile", "repad_logits_with_grad", "tie_word_embeddings", "position_embedding_type")
    config.ignore("layer_norm_eps", "sentence_transformers")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    check_heads(hidden, heads, config)
    eps, bias = config.positive("norm_eps", 1e-5), config.get("norm_bias", False)
    num_layers, max_position = config.size("num_hidden_layers"), config.size("max_position_embeddings", 8192)

    def norm(name: str) -> NormSpec:
        return layer_norm(name, hidden, eps, bias=bias)

    mlp = GatedMLPSpec(
        hidden,
        config.size("intermediate_size"),
        bias=config.get("mlp_bias", False),
        activation=activation_of(config, "hidden_activation"),
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
    )
    layers = tuple(
        LayerSpec(
            name=f"model.layers.{index}",
            # The embeddings are normalized already.
            mixer=SubLayer(attention, norm("attn_norm") if index else None),
            feed_forward=SubLayer(mlp, norm("mlp_norm")),
        )
        for index, attention in enumerate(_attentions(config, num_layers, max_position))
    )
    is_scored = is_classifier(config)
    return ModelSpec(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size", 50368),
        hidden_size=hidden,
        max_position=max_position,
        layers=layers,
        final_norm=norm("model.final_norm"),
        names=ModelNames(
            embedding="model.embeddings.tok_embeddings",
            ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
            prefixes=tuple((name, f"model.{name}") for name in ("embeddings.", "layers.", "final_norm.")),
        ),
        encoder=EncoderSpec(
            hidden_size=hidden,
            norm=norm("model.embeddings.norm"),
            pooling=(_classifier_pooling(config),) if is_scored else ("mean",),
            head=_head(config, hidden, norm("head.norm")) if is_scored else (),
        ),
    )


def _attentions(config: HFConfig, num_layers: int, max_position: int) -> Iterator[AttentionSpec]:
    """The attention of each layer: both ways, over a window or over the whole text."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.get("attention_bias", False)
    every, window = config.size("global_attn_every_n_layers", 3), config.size("local_attention", 128) // 2 + 1
    ropes = _ropes(config, hidden // heads, max_position)
    for layer_window in config.layer_windows(num_layers, window, lambda index: index % every > 0):
        yield AttentionSpec(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            scale=(hidden // heads) ** -0.5,
            rope=ropes["full_attention" if layer_window is None else "sliding_attention"],
            window=layer_window,
            qkv_bias=bias,
            output_bias=bias,
            bidirectional=True,
            names=AttentionNames(qkv=("attn.Wqkv",), output="attn.Wo"),
        )


def _ropes(config: HFConfig, head_dim: int, max_position: int) -> dict[str, RopeConfig]:
    """The RoPE configs of both kinds of layers; older files have `global_rope_theta` and `local_rope_theta`."""
    full = config.positive("global_rope_theta", _THETAS["full_attention"])
    local = config.positive("local_rope_theta", _THETAS["sliding_attention"])
    thetas = {"full_attention": full, "sliding_attention": local}
    return config.ropes_by_kind(head_dim, max_position, thetas, scaled=tuple(thetas))


def _classifier_pooling(config: HFConfig) -> Pooling:
    config.expect("classifier_pooling", "cls", "mean")
    return "mean" if config.get("classifier_pooling", "cls") == "mean" else "cls"


def _head(config: HFConfig, hidden: int, norm: NormSpec) -> tuple[HeadPart, ...]:
    config.expect("classifier_activation", "gelu")
    return (
        DenseSpec("head.dense", hidden, hidden, config.get("classifier_bias", False), "gelu"),
        norm,
        DenseSpec("classifier", hidden, num_labels(config), True),
    )
