"""Llama 4: chunked attention in three of four layers, full attention without RoPE in the others; it takes images.

    x += attention(norm(x))                         q and k: rope, then a norm without weights; over chunks of keys
    n = norm(x)                                     every fourth layer: all keys, no RoPE, q scaled by position
    s, e = max(sigmoid(Wr n))
    x += mlp_e(s * n) + shared_mlp(n)               or mlp(n)

Layers without RoPE scale their queries by position. Routing weights multiply the experts' inputs.
"""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.rope import TemperatureConfig
from penstock.layers.spec import FeedForwardSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.mixtures import read_routing
from penstock.models.families.towers.llama4_vision import llama4_vision_tower
from penstock.models.families.towers.reading import read_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_TOWERS = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
_FULL, _CHUNKED = "full_attention", "chunked_attention"


def llama4_spec(config: HFConfig) -> ModelSpec:
    """Read a `Llama4ForCausalLM`, or the text model of a `Llama4ForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    text.ignore("router_jitter_noise", "for_llm_compressor")  # of training, and of tools
    dense = read_dense(
        text, max_position=4096 * 32, head_dim=128, num_heads=40, num_kv_heads=8, norm_eps=1e-5, theta=500000.0
    )
    parts = _feed_forwards(text, dense)
    layers = (
        dense.layer(index, attention, part)
        for index, (attention, part) in enumerate(zip(_attentions(text, dense), parts, strict=True))
    )
    tower = read_tower(config, lambda vision: llama4_vision_tower(vision, dense.model.hidden_size))
    names = multimodal_names("vision_model", "multi_modal_projector")
    return replace(dense.model, layers=tuple(layers), names=names, tower=tower)


def _attentions(config: HFConfig, dense: Dense) -> list[AttentionSpec]:
    """The attention of each layer."""
    rope = dense.attention.rope
    assert rope is not None, "read_dense gives one"
    known = ("default", "linear", "llama3", "frequency_factors")
    if rope.type not in known:  # the norms after RoPE would cancel other types' factor on cosines and sines
        raise config.unsupported("rope type", rope.type, known)
    has_rope = _turned(config, dense.num_layers)
    kinds = config.layer_kinds(
        dense.num_layers, (_FULL, _CHUNKED), [_CHUNKED if is_rotated else _FULL for is_rotated in has_rope]
    )
    chunk = config.size("attention_chunk_size", 8192)
    bias = config.get("attention_bias", False)
    with_rope = replace(
        dense.attention,
        qkv_bias=bias,
        output_bias=bias,
        interleaved_rope=True,
        qk_norm_eps=dense.norm_eps if config.get("use_qk_norm", True) else None,
        qk_norm_weight=False,
    )
    tuning = TemperatureConfig(
        config.positive("attn_scale", 0.1, or_zero=True), config.size("floor_scale", 8192), first=1
    )
    without = replace(
        with_rope,
        rope=None,
        qk_norm_eps=None,
        temperature=tuning if config.get("attn_temperature_tuning", True) else None,
    )
    return [
        replace(with_rope if rotates else without, chunk=chunk if kind == _CHUNKED else None)
        for rotates, kind in zip(has_rope, kinds, strict=True)
    ]


def _turned(config: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer has RoPE: 1 in `no_rope_layers` means that it does."""
    interval = config.size("no_rope_layer_interval", 4)
    given = config.find("no_rope_layers", list) or [(index + 1) % interval > 0 for index in range(num_layers)]
    if len(given) < num_layers or not all(flag in (0, 1) for flag in given):
        raise CheckpointError(f"no_rope_layers in {config.file} must have 0 or 1 for each of the {num_layers} layers")
    return [bool(flag) for flag in given[:num_layers]]


def _feed_forwards(config: HFConfig, dense: Dense) -> list[FeedForwardSpec]:
    """The feed-forward part of each layer: experts with a shared expert, or an MLP."""
    hidden, inner = dense.model.hidden_size, dense.mlp.intermediate_size
    mlp = _mlp(hidden, config.size("intermediate_size_mlp", 16384), "feed_forward")
    mixture = MixtureSpec(
        hidden,
        inner,
        read_routing(config, config.size("num_local_experts", 16), top_k=1, score="sigmoid"),
        shared=_mlp(hidden, inner, "feed_forward.shared_expert"),
        scales_x=True,
        transposed=True,
        names=MixtureNames(router="feed_forward.router", experts="feed_forward.experts"),
    )
    step = config.size("interleave_moe_layer_step", 1)
    sparse = config.find("moe_layers", list)
    if sparse is None:
        sparse = list(range(step - 1, dense.num_layers, step))
    if not all(type(index) is int and index >= 0 for index in sparse):
        raise CheckpointError(f"moe_layers in {config.file} must be a list of layer indices, from 0")
    return [mixture if index in set(sparse) else mlp for index in range(dense.num_layers)]


def _mlp(hidden_size: int, intermediate_size: int, name: str) -> GatedMLPSpec:
    gate_up = (f"{name}.gate_proj", f"{name}.up_proj")
    return GatedMLPSpec(hidden_size, intermediate_size, gate_up=gate_up, down=f"{name}.down_proj")
