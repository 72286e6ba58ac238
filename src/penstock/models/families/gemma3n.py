"""Gemma 3n (E2B, E4B), text: four residual streams, per-layer embeddings, shared keys, sparse MLPs below.

x_0 .. x_3 = embedding and maps of it           scaled to its magnitude
p = predicted(x)                                a mixture of the streams (AltUp)
n = norm(p_0)
a = (p_0 + norm(attention(n)) + n + norm(Wr Wl n)) / sqrt(2)             four of five layers: a sliding window
y = a + norm(mlp(norm(a)))                      lower layers: only the gates far above their mean
x = corrected(p, y)
x_1 .. += norm(W (gelu(Wp (x_0 * s)) * e))      e: the layer's part of the token's per-layer embedding

logits = 30 * tanh(W norm(mean of x_0 and maps of the others) / 30)

The upper layers read the KV cache of the last lower layer of the same kind. The towers are skipped.
"""

from dataclasses import replace
from statistics import NormalDist

from penstock.errors import CheckpointError
from penstock.layers.altup import AltUpSpec
from penstock.layers.attention import AttentionSpec
from penstock.layers.mlp import GatedMLPSpec, SparseMLPSpec
from penstock.layers.per_layer import GatedPerLayerInputSpec, PerLayerEmbeddingSpec
from penstock.layers.spec import FeedForwardSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.gemma2 import read_soft_cap
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.gemma4 import shared_layer
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelNames, ModelSpec, SubLayer

_TOWERS = ("vision_config", "audio_config", "vision_soft_tokens_per_image", "audio_soft_tokens_per_image")
_TOKENS = ("image_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id")


def gemma3n_spec(config: HFConfig) -> ModelSpec:
    """Read a `Gemma3nForCausalLM`, or the text model of a `Gemma3nForConditionalGeneration`."""
    text = config.text(*_TOWERS, *_TOKENS)
    text.ignore("altup_coef_clip")  # of training
    text.expect("altup_active_idx", 0)
    dense = read_dense(
        text,
        max_position=32768,
        head_dim=256,
        num_layers=35,
        num_heads=8,
        num_kv_heads=2,
        vocab_size=262400,
        tied=True,
        activation="gelu_tanh",
        reads_rope=False,
        reads_mlp=False,
    )
    altup = AltUpSpec(
        dense.model.hidden_size,
        streams=text.size("altup_num_inputs", 4, least=2),
        rank=text.size("laurel_rank", 64),
        norm_eps=dense.norm_eps,
        scales_output=text.get("altup_correct_scale", True),
    )
    per_layer = PerLayerEmbeddingSpec(
        text.size("vocab_size_per_layer_input", 262144),
        dense.model.hidden_size,
        text.size("hidden_size_per_layer_input", 256),
        dense.num_layers,
        dense.norm_eps,
        tokens=dense.model.vocab_size,
    )
    attentions = _attentions(text, dense)
    parts = _feed_forwards(text, dense)
    return replace(
        dense.model,
        layers=tuple(
            _layer(dense, index, attention, part, per_layer, altup)
            for index, (attention, part) in enumerate(zip(attentions, parts, strict=True))
        ),
        embedding_multiplier=dense.model.hidden_size**0.5,
        logits_soft_cap=read_soft_cap(text, "final_logit_softcapping", 30.0),
        per_layer=per_layer,
        names=_names(attentions),
    )


def _attentions(config: HFConfig, dense: Dense) -> list[AttentionSpec]:
    """The attention of each layer; the upper ones share keys and values."""
    count, head_dim = dense.num_layers, dense.attention.head_dim
    windows = config.layer_windows(count, config.size("sliding_window", 512), lambda index: (index + 1) % 5 > 0)
    thetas = {"full_attention": 1e6, "sliding_attention": 1e4}
    ropes = config.ropes_by_kind(head_dim, dense.model.max_position, thetas, "rope_local_base_freq")
    first_shared = count - config.size("num_kv_shared_layers", 15, least=0)
    bias = config.get("attention_bias", False)
    found: list[AttentionSpec] = []
    for index, window in enumerate(windows):
        attention = replace(
            dense.attention,
            scale=1.0,
            rope=ropes["full_attention" if window is None else "sliding_attention"],
            window=window,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm_eps=dense.norm_eps,
            value_norm=True,
        )
        if index >= first_shared:
            attention = replace(attention, shared=shared_layer(config, found[: max(first_shared, 0)], attention))
        found.append(attention)
    return found


def _feed_forwards(config: HFConfig, dense: Dense) -> list[FeedForwardSpec]:
    count, hidden = dense.num_layers, dense.model.hidden_size
    sizes = config.by_layer("intermediate_size", count)
    shares = config.by_layer("activation_sparsity_pattern", count)
    if not config.has("activation_sparsity_pattern"):
        shares = [0.95 if count > 10 and index < 10 else 0.0 for index in range(count)]
    found: list[FeedForwardSpec] = []
    for given, share in zip(sizes, shares, strict=True):
        size = 16384 if given is None else given
        if type(size) is not int or not 1 <= size <= 2**24:
            raise CheckpointError(f"intermediate_size in {config.file} must be an integer above 0 for each layer")
        if type(share) not in (int, float) or not 0 <= share < 1:
            raise CheckpointError(
                f"activation_sparsity_pattern in {config.file} must be a number from 0 to below 1 for each layer"
            )
        mlp = GatedMLPSpec(hidden, size, activation="gelu_tanh")
        found.append(SparseMLPSpec(mlp, NormalDist().inv_cdf(share)) if share else mlp)
    return found


def _layer(
    dense: Dense,
    index: int,
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    per_layer: PerLayerEmbeddingSpec,
    altup: AltUpSpec,
) -> LayerSpec:
    columns = GatedPerLayerInputSpec(
        dense.model.hidden_size, per_layer.size, index * per_layer.size, per_layer.columns, "gelu_tanh"
    )
    norm = dense.norm
    return LayerSpec(
        name=f"model.layers.{index}",
        mixer=SubLayer(attention, norm("input_layernorm"), norm("post_attention_layernorm")),
        feed_forward=SubLayer(feed_forward, norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")),
        per_layer=SubLayer(columns, None, norm("post_per_layer_input_norm")),
        altup=altup,
    )


def _names(attentions: list[AttentionSpec]) -> ModelNames:
    names = multimodal_names("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    unused = (
        rf"model\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        for index, attention in enumerate(attentions)
        if attention.shared is not None
    )
    return replace(names, ignored=(*names.ignored, *unused))
