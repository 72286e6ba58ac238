"""OLMo (1B, 7B): Llama with layer norms that have neither weights nor biases, and limits on queries, keys and values.

x += attention(norm(x))      Llama's; q, k and v may be limited to `clip_qkv` before RoPE
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.layers.spec import NormSpec
from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer


def olmo_spec(config: HFConfig) -> ModelSpec:
    """Read an `OlmoForCausalLM`."""
    dense = read_dense(config, max_position=2048)
    bias = config.get("attention_bias", False)
    clip = config.positive("clip_qkv", 1.0) if config.has("clip_qkv") else None
    config.ignore("clip_qkv", "layer_norm_eps")
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias, qkv_clip=clip)
    norm = NormSpec("norm", dense.model.hidden_size, 1e-5, centred=True, weighted=False)
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(f"model.layers.{index}", SubLayer(attention, norm), SubLayer(dense.mlp, norm))
            for index in range(dense.num_layers)
        ),
        final_norm=norm,
    )
