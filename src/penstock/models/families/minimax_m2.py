"""MiniMax M2 (230B-A10B): norms over all query and key heads, RoPE on half of each head, sigmoid-routed experts.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised over all heads together
x += Wo attend(rope(q), rope(k), v)             RoPE on the first `rotary_dim` elements of each head
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + correction
x += sum of s[e] / sum(s) * mlp_e(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtral import NAMES
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_NAMES = replace(NAMES, correction="block_sparse_moe.e_score_correction_bias")


def minimax_m2_spec(config: HFConfig) -> ModelSpec:
    """Read a `MiniMaxM2ForCausalLM`."""
    config.ignore("router_jitter_noise", "mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    config.expect("scoring_func", "sigmoid")
    config.expect("use_routing_bias", True)
    config.expect("use_qk_norm", True)
    config.expect("qk_norm_type", "per_layer")
    config.expect("shared_intermediate_size", 0)
    head_dim = config.size("head_dim", 128)
    dense = read_dense(
        config,
        max_position=196608,
        head_dim=128,
        num_heads=48,
        num_kv_heads=8,
        theta=5e6,
        partial_rotary=(config.find_size("rotary_dim") or head_dim) / head_dim,
    )
    attention = replace(dense.attention, qk_norm_eps=dense.norm_eps, qk_norm_whole=True)
    routing = read_routing(config, config.size("num_local_experts", 256), 8, score="sigmoid", renormalize=True)
    mixture = MixtureSpec(dense.model.hidden_size, dense.mlp.intermediate_size, routing, correction=True, names=_NAMES)
    layers = tuple(dense.layer(index, attention, mixture) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
