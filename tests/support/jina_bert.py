"""Small random encoders like Jina embeddings v2, and their definition: `transformers` has no class for them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.encoders import VOCABULARY, write_tokenizer

Weights = dict[str, Tensor]

_HIDDEN, _HEADS, _INNER, _LAYERS = 48, 6, 80, 2
_SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
"""Of six heads: those of four, then every second one of eight."""


def write_jina_bert(folder: Path, architecture: str = "JinaBertModel") -> Weights:
    """Write a random encoder, with a pooler and a classifier of one label; returns its weights."""
    torch.manual_seed(4)
    sizes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, _HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, _HIDDEN),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", _HIDDEN, _HIDDEN),
        **_linear("classifier", 1, _HIDDEN),
    }
    for index in range(_LAYERS):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            sizes |= _linear(f"{layer}.attention.{name}", _HIDDEN, _HIDDEN)
        sizes[f"{layer}.mlp.gated_layers.weight"] = (2 * _INNER, _HIDDEN)
        sizes |= _linear(f"{layer}.mlp.wo", _HIDDEN, _INNER)
        sizes |= _norm(f"{layer}.attention.output.LayerNorm") | _norm(f"{layer}.mlp.layernorm")
    weights = {name: 0.2 * torch.randn(size) + ("orm.weight" in name) for name, size in sizes.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "bert",
        "hidden_size": _HIDDEN,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "intermediate_size": _INNER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "num_labels": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, decoder=False, typed=True)
    return weights


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (_HIDDEN,), f"{name}.bias": (_HIDDEN,)}


def hidden_states(weights: Weights, tokens: list[int], types: list[int] | None = None) -> Tensor:
    """The hidden states [tokens, hidden] of a text."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (_HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def heads(name: str, x: Tensor) -> Tensor:
        return linear(name, x).view(len(x), _HEADS, -1).transpose(0, 1)

    places = torch.arange(len(tokens))
    bias = torch.tensor(_SLOPES).view(-1, 1, 1) * -(places[:, None] - places).abs()
    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = norm("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][types or [0] * len(tokens)])
    for index in range(_LAYERS):
        layer = f"encoder.layer.{index}"
        query, key, value = (heads(f"{layer}.attention.self.{name}", x) for name in ("query", "key", "value"))
        seen = (query @ key.transpose(1, 2) / (_HIDDEN / _HEADS) ** 0.5 + bias).softmax(-1) @ value
        mixed = linear(f"{layer}.attention.output.dense", seen.transpose(0, 1).flatten(1))
        x = norm(f"{layer}.attention.output.LayerNorm", x + mixed)
        gate, up = linear(f"{layer}.mlp.gated_layers", x).chunk(2, -1)
        x = norm(f"{layer}.mlp.layernorm", x + linear(f"{layer}.mlp.wo", F.gelu(gate) * up))
    return x


def score(weights: Weights, tokens: list[int], types: list[int]) -> float:
    """The classifier's logit of a pair."""
    pooled = F.linear(
        hidden_states(weights, tokens, types)[0], weights["pooler.dense.weight"], weights["pooler.dense.bias"]
    )
    return F.linear(pooled.tanh(), weights["classifier.weight"], weights["classifier.bias"]).item()
