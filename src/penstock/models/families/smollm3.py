"""SmolLM3: Llama without RoPE in every fourth layer.

x += attention(norm(x))      Llama's; q and k are not rotated in every fourth layer
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def smollm3_spec(config: HFConfig) -> ModelSpec:
    """Read a `SmolLM3ForCausalLM`."""
    dense = read_dense(config, max_position=32768, num_kv_heads=4, theta=2e6, tied=True)
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias)
    mlp = replace(dense.mlp, bias=config.get("mlp_bias", False))
    has_rope = _turned(config, dense.num_layers)
    window, slides = config.find_size("sliding_window"), config.get("use_sliding_window", False)
    windows = config.layer_windows(dense.num_layers, window if slides else None, lambda index: not has_rope[index])
    layers = tuple(
        dense.layer(
            index, replace(attention, window=layer_window, rope=attention.rope if has_rope[index] else None), mlp
        )
        for index, layer_window in enumerate(windows)
    )
    return replace(dense.model, layers=layers)


def _turned(config: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer has RoPE."""
    interval = config.size("no_rope_layer_interval", 4)
    given = config.find("no_rope_layers", list)
    if given is None:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(given) < num_layers or any(flag not in (0, 1) for flag in given):
        raise CheckpointError(f"no_rope_layers in {config.file} must have 0 or 1 for each of the {num_layers} layers")
    return [bool(flag) for flag in given[:num_layers]]
