"""Qwen3's mixtures of experts (30B-A3B, 235B-A22B, Coder): Qwen3 with experts instead of most MLPs.

x += attention(norm(x))                         Qwen3's
n = norm(x)
p = top_k(softmax(Wr n))                        may be divided by their sum
x += sum of p[e] * mlp_e(n) over those experts e
"""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.layers.mixture import MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def qwen3_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3MoeForCausalLM`."""
    return qwen3_mixture(config, renormalize=config.get("norm_topk_prob", False))


def qwen3_mixture(config: HFConfig, *, renormalize: bool) -> ModelSpec:
    """Read a mixture; `renormalize`: whether the weights of a token's experts are divided by their sum."""
    dense = read_dense(config, max_position=32768)
    bias = config.get("attention_bias", False)
    window = config.find_size("sliding_window", absent=4096)
    attention = replace(
        dense.attention,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=dense.norm_eps,
        window=window if config.get("use_sliding_window", False) else None,
    )
    experts = config.find_size("num_experts") or config.size("num_local_experts", 128)
    mixture = MixtureSpec(
        dense.model.hidden_size,
        config.size("moe_intermediate_size", 768),
        read_routing(config, experts, renormalize=renormalize),
    )
    plain = mlp_layers(config, dense.num_layers)
    layers = tuple(
        dense.layer(index, attention, None if index in plain else mixture) for index in range(dense.num_layers)
    )
    return replace(dense.model, layers=layers)


def mlp_layers(config: HFConfig, num_layers: int) -> set[int]:
    """Indices of the layers that have an MLP instead of experts.

    Raises:
        CheckpointError: `mlp_only_layers` contains something other than layer indices.
    """
    named: list[object] = config.get("mlp_only_layers", [])
    if not all(isinstance(index, int) and 0 <= index < num_layers for index in named):
        raise CheckpointError(
            f"mlp_only_layers in {config.file} must be a list of layer indices from 0 to {num_layers - 1}"
        )
    step = config.size("decoder_sparse_step", 1)
    return {index for index in range(num_layers) if index in named or (index + 1) % step}
