"""Cohere's Command R, R7B and A: attention and MLP side by side, layer norms without biases, a factor on the logits.

n = norm(x)                                     one norm for both parts: a layer norm without a bias
x += attention(n) + mlp(n)                      RoPE turns elements 2 i and 2 i + 1 of a head together
                                                Cohere 2: three of four layers have windows, and only these RoPE
logits = logit_scale * W norm(x)
"""

from dataclasses import replace

from penstock.layers.spec import NormSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer


def cohere_spec(config: HFConfig) -> ModelSpec:
    """Read a `CohereForCausalLM`."""
    config.expect("use_qk_norm", False)
    dense = _dense(config, theta=500000.0)
    return _model(config, dense, [None] * dense.num_layers, everywhere=True)


def cohere2_spec(config: HFConfig) -> ModelSpec:
    """Read a `Cohere2ForCausalLM`."""
    dense = _dense(config, theta=10000.0)
    pattern = config.size("sliding_window_pattern", 4)
    window = config.find_size("sliding_window", absent=4096)
    windows = config.layer_windows(dense.num_layers, window, lambda index: (index + 1) % pattern != 0)
    return _model(config, dense, list(windows), everywhere=False)


def _dense(config: HFConfig, theta: float) -> Dense:
    dense = read_dense(config, max_position=8192, norm_eps=1e-5, norm_eps_key="layer_norm_eps", theta=theta, tied=True)
    bias = config.get("attention_bias", False)
    return replace(dense, attention=replace(dense.attention, interleaved_rope=True, qkv_bias=bias, output_bias=bias))


def _model(config: HFConfig, dense: Dense, windows: list[int | None], *, everywhere: bool) -> ModelSpec:
    """The model with these windows; `everywhere`: layers without one have RoPE, too."""
    rope = dense.attention.rope
    attentions = (
        replace(dense.attention, window=window, rope=rope if window or everywhere else None) for window in windows
    )
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(
                f"model.layers.{index}",
                SubLayer(attention, _norm(dense, "input_layernorm")),
                SubLayer(dense.mlp, None),
                parallel=True,
            )
            for index, attention in enumerate(attentions)
        ),
        final_norm=_norm(dense, "model.norm"),
        logits_divisor=1.0 / config.positive("logit_scale", 0.0625),
    )


def _norm(dense: Dense, name: str) -> NormSpec:
    return replace(dense.norm(name), centred=True)
