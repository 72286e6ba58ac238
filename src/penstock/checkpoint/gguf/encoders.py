"""Converts the metadata of encoders to `config.json` keys."""

from typing import Any

from penstock.checkpoint.gguf.gemma import read_gemma3
from penstock.checkpoint.gguf.keys import Given, layer_norm_eps
from penstock.errors import CheckpointError

DENSE_MAPS = ("dense_2", "dense_3")
"""Linear maps after the pooling, in their order."""
_RANK = 4
"""`pooling_type` of rerankers."""
_POOLINGS = {1: "mean", 2: "cls"}
_ACTIVATIONS = {"gelu": "gelu", "silu": "silu"}


def read_modern_bert(given: Given) -> dict[str, Any]:
    """ModernBert; with `cls.output.weight` it is a reranker."""
    keys, config = given.keys, given.config
    activation = keys.find("hidden_activation", str) or "gelu"
    if activation not in _ACTIVATIONS:
        raise keys.unsupported("hidden_activation", activation, f"supported: {', '.join(_ACTIVATIONS)}")
    found = {
        **dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "rope_scaling")),
        "norm_eps": config["rms_norm_eps"],
        "norm_bias": "output_norm.bias" in given.tensors,
        "attention_bias": given.has("attn_qkv.bias"),
        "mlp_bias": given.has("ffn_up.bias"),
        "hidden_activation": _ACTIVATIONS[activation],
        "local_attention": keys.find("attention.sliding_window", int),
        "global_attn_every_n_layers": keys.find("attention.sliding_window_pattern", int),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": keys.find("rope.freq_base_swa", float) or config["rope_theta"],
    }
    pooling = keys.find("classifier.pooling_type", int) or 1
    output = given.tensors.get("cls.output.weight")
    if output is None:
        return found
    if pooling not in _POOLINGS:
        raise keys.unsupported("classifier.pooling_type", pooling, "1 (mean) and 2 (cls) are")
    return {
        **found,
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": _POOLINGS[pooling],
        "classifier_bias": "cls.bias" in given.tensors,
        "num_labels": output.shape[0],
    }


def read_bert(given: Given) -> dict[str, Any]:
    """Files of RoBERTa and XLM-RoBERTa are the same, without the positions that those leave unused."""
    found = {
        **layer_norm_eps(given),
        **dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta")),
        "hidden_act": "gelu",
        "type_vocab_size": _num_token_types(given),
    }
    if given.keys.find("pooling_type", int) != _RANK and "cls.output.weight" not in given.tensors:
        return found
    return {
        **found,
        "architectures": ["XLMRobertaForSequenceClassification"],
        "pad_token_id": -1,
        "num_labels": _num_labels(given),
    }


def read_gemma_embedding(given: Given) -> dict[str, Any]:
    """EmbeddingGemma."""
    given.keys.ignore(*(f"{name}_feat_{side}" for name in DENSE_MAPS for side in ("in", "out")))
    return {**read_gemma3(given), "use_bidirectional_attention": True}


def read_nomic_bert(given: Given) -> dict[str, Any]:
    """NomicBert."""
    others = dict.fromkeys(("num_key_value_heads",))
    return {**layer_norm_eps(given), **others, "hidden_act": "silu", "type_vocab_size": _num_token_types(given)}


def read_jina_bert(given: Given) -> dict[str, Any]:
    """Jina embeddings v2."""
    if given.has("attn_q_norm.weight"):
        raise CheckpointError(
            f"{given.keys.file} has norms of queries and keys, which are not supported for this family"
        )
    if given.keys.find("pooling_type", int) == _RANK:
        raise CheckpointError(
            f"{given.keys.file} ranks, which is not supported for files of this family; its folder is"
        )
    return {
        **layer_norm_eps(given),
        **dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta")),
        "hidden_act": "gelu",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "type_vocab_size": _num_token_types(given),
    }


def _num_token_types(given: Given) -> int:
    types = given.tensors.get("token_types.weight")
    return 2 if types is None else types.shape[0]


def _num_labels(given: Given) -> int:
    dense, output = (given.tensors.get(name) for name in ("cls.weight", "cls.output.weight"))
    if dense is None or output is None:
        raise CheckpointError(
            f"{given.keys.file} ranks, but lacks cls.weight or cls.output.weight: files of BERT's own rerankers lack "
            "their pooler, and are not supported"
        )
    return output.shape[0]
