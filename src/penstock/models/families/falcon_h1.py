"""Falcon-H1 (0.5B to 34B): Mamba 2 and attention side by side in every layer; factors on their inputs and outputs.

x = embedding_multiplier * embedding
n = norm(x)                                     one norm for both
x += a * mamba(b * n) + c * attention(d * n)    Mamba 2's projections have a factor each, and keys have one;
                                                its result has a gate, and in some models a norm
x += e * Wd (silu(f * Wg norm(x)) * Wu norm(x))

logits = lm_head_multiplier * W norm(x)
"""

from collections.abc import Iterator
from dataclasses import replace

from penstock.layers.attention import AttentionSpec
from penstock.layers.mamba2 import Mamba2Spec
from penstock.layers.mlp import GatedMLPSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.granite_moe_hybrid import read_mamba
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer


def falcon_h1_spec(config: HFConfig) -> ModelSpec:
    """Read a `FalconH1ForCausalLM`."""
    config.ignore("num_logits_to_keep", "layers_block_type", "mamba_use_mlp")
    dense = read_dense(config, max_position=8192, num_kv_heads=8, norm_eps=1e-5)
    return replace(
        dense.model,
        layers=tuple(_layers(config, dense)),
        final_norm=dense.norm("model.final_layernorm"),
        embedding_multiplier=config.positive("embedding_multiplier", 1.0),
        logits_divisor=1.0 / config.positive("lm_head_multiplier", 1.0),
        names=replace(dense.model.names, ignored=(*dense.model.names.ignored, r".*\.mamba\.mup_vector")),
    )


def _layers(config: HFConfig, dense: Dense) -> Iterator[LayerSpec]:
    """Each layer as two: Mamba 2, and beside it attention, followed by the MLP."""
    of_gate, of_down = _factors(config, "mlp_multipliers", 2)
    mlp = GatedMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        bias=config.get("mlp_bias", False),
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        gate_factor=of_gate,
    )
    mamba = SubLayer(
        _mamba(config, dense),
        dense.norm("input_layernorm"),
        input_factor=config.positive("ssm_in_multiplier", 1.0),
        output_factor=config.positive("ssm_out_multiplier", 1.0),
    )
    attention = SubLayer(
        _attention(config, dense),
        None,
        input_factor=config.positive("attention_in_multiplier", 1.0),
        output_factor=config.positive("attention_out_multiplier", 1.0),
    )
    feed_forward = SubLayer(mlp, dense.norm("pre_ff_layernorm"), output_factor=of_down)
    for index in range(dense.num_layers):
        name = f"model.layers.{index}"
        yield LayerSpec(name, mamba, None)
        yield LayerSpec(name, attention, feed_forward, beside=True)


def _mamba(config: HFConfig, dense: Dense) -> Mamba2Spec:
    mamba = read_mamba(config, dense, config.find_size("mamba_d_ssm", absent=1024))
    config.expect("projectors_bias", mamba.bias)
    gate, values, inputs, outputs, steps = _factors(config, "ssm_multipliers", 5)
    return replace(
        mamba,
        normed=config.get("mamba_rms_norm", False),
        gate_first=not config.get("mamba_norm_before_gate", True),
        factors=(gate, values, inputs, outputs, steps),
    )


def _attention(config: HFConfig, dense: Dense) -> AttentionSpec:
    """The keys' factor is one on the scores."""
    bias = config.get("attention_bias", False)
    scale = dense.attention.scale * config.positive("key_multiplier", 1.0)
    return replace(dense.attention, scale=scale, qkv_bias=bias, output_bias=bias)


def _factors(config: HFConfig, key: str, count: int) -> list[float]:
    given: list[object] = config.find(key, list) or [1.0] * count
    factors = [float(factor) for factor in given if isinstance(factor, (int, float)) and 0 < factor < float("inf")]
    if len(given) != count or len(factors) != count:
        raise config.unsupported(key, given, (f"{count} numbers above 0",))
    return factors
