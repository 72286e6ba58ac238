"""LFM2's mixtures of experts (8B-A1B): LFM2 with sigmoid-routed experts after the first, dense layers.

x += mixer(norm(x))                             LFM2's convolution or attention
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + bias
x += scaling * sum of s[e] / sum(s) * mlp_e(n)  the first layers: mlp(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.models.families.lfm2 import lfm2_layer, lfm2_mixers, lfm2_mlp, read_lfm2
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

NAMES = MixtureNames(
    router="feed_forward.gate",
    experts="feed_forward.experts",
    gate="w1",
    up="w3",
    down="w2",
    correction="feed_forward.expert_bias",
)


def lfm2_moe_spec(config: HFConfig) -> ModelSpec:
    """Read an `Lfm2MoeForCausalLM`."""
    dense = read_lfm2(config)
    hidden = dense.model.hidden_size
    mlp = lfm2_mlp(hidden, dense.mlp.intermediate_size)
    routing = read_routing(
        config,
        config.size("num_experts", 32),
        4,
        score="sigmoid",
        renormalize=config.get("norm_topk_prob", True),
        epsilon=1e-6,
        scaling=config.positive("routed_scaling_factor", 1.0),
    )
    mixture = MixtureSpec(
        hidden,
        config.size("moe_intermediate_size", 1792),
        routing,
        correction=config.get("use_expert_bias", True),
        names=NAMES,
    )
    first = config.size("num_dense_layers", 2, least=0)
    return replace(
        dense.model,
        layers=tuple(
            lfm2_layer(dense, index, mixer, mlp if index < first else mixture)
            for index, mixer in enumerate(lfm2_mixers(config, dense))
        ),
    )
