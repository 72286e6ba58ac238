"""Qwen3-Next: Qwen3.5's layers with other weight names, and experts in most of them.

x += mixer(norm(x))                             a gated delta net, or gated attention: see qwen3_5.py
n = norm(x)
p = top_k(softmax(Wr n))
x += sum of p[e] * mlp_e(n) + sigmoid(Ws n) * shared_mlp(n)
"""

from dataclasses import replace

from penstock.models.families.qwen3_5 import delta_mixers, hybrid_layer, mtp_head, qwen_mixture, read_hybrid
from penstock.models.families.qwen3_moe import mlp_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def qwen3_next_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3NextForCausalLM`."""
    dense = read_hybrid(config)
    mixture = qwen_mixture(config, dense, experts=512, renormalize=config.get("norm_topk_prob", True))
    plain = mlp_layers(config, dense.num_layers)
    mixers = delta_mixers(config, dense, together="all")
    has_head = config.size("num_nextn_predict_layers", 1, least=0) > 0  # published configs lack the key
    return replace(
        dense.model,
        layers=tuple(
            hybrid_layer(dense, index, mixer, dense.mlp if index in plain else mixture)
            for index, mixer in enumerate(mixers)
        ),
        names=replace(dense.model.names, ignored=(*dense.model.names.ignored, r"mtp\..*")),
        mtp=mtp_head(dense, mixture) if has_head else None,
    )
