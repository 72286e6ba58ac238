"""EXAONE mixtures of experts (K-EXAONE, 236B-A23B): EXAONE 4's attention after a norm, DeepSeek V3's experts.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised head by head
x += Wo attend(rope(q), rope(k), v)             full layers of models with windows: q and k are not rotated
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + correction, in the best groups
x += scaling * sum of s[e] / sum(s) * mlp_e(n) + shared_mlp(n)           the first layers: mlp(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureNames
from penstock.models.families.dense import read_dense
from penstock.models.families.exaone4 import exaone_attentions
from penstock.models.families.mixtures import sigmoid_mixture, sparse_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def exaone_moe_spec(config: HFConfig) -> ModelSpec:
    """Read an `ExaoneMoeForCausalLM`."""
    dense = read_dense(config, max_position=2048, num_heads=32, num_kv_heads=32, norm_eps=1e-5)
    mixture = sigmoid_mixture(
        config,
        dense.model.hidden_size,
        experts=("num_experts", 64),
        top_k=8,
        shared=("num_shared_experts", 1),
        inner=1024,
        scaling=2.5,
    )
    mixture = replace(mixture, names=MixtureNames(correction="mlp.e_score_correction_bias"))
    first = config.size("first_k_dense_replace", 1, least=0)
    sparse = sparse_layers(config, dense.num_layers, lambda index: index >= first)
    attentions = exaone_attentions(config, dense)
    layers = tuple(
        dense.layer(index, attention, mixture if has else None)
        for index, (attention, has) in enumerate(zip(attentions, sparse, strict=True))
    )
    names = replace(dense.model.names, ignored=(*dense.model.names.ignored, r"mtp\..*"))
    return replace(dense.model, layers=layers, names=names)
