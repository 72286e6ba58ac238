"""The 8B model whose speed is measured, and a tiny one in its place where there is no GPU."""

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": None,
    "bos_token_id": None,
}
TINY = LLAMA_8B | {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPT, ANSWER = 128, 24
"""Tokens of each request."""


def shape_for(*, is_gpu: bool) -> dict[str, Any]:
    return LLAMA_8B if is_gpu else TINY


def batches_for(*, is_gpu: bool) -> tuple[int, ...]:
    return (1, 16, 64) if is_gpu else (1, 2)


def weight_bytes(shape: dict[str, Any]) -> int:
    """Bytes of bfloat16 weights that a step of few tokens reads: all but the embeddings."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * shape["head_dim"]
    return 2 * (shape["num_hidden_layers"] * hidden * (heads + 3 * inner) + shape["vocab_size"] * hidden)


def decode_row(shape: dict[str, Any], batch: int, seconds: float) -> dict[str, Any]:
    """What one step of `batch` sequences tells."""
    keys = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    moved = weight_bytes(shape) + batch * (PROMPT + ANSWER // 2) * keys
    flops = batch * weight_bytes(shape)  # 2 for each weight, of 2 bytes
    return {"output tokens/s": batch / seconds, "bytes": moved, "flops": flops, "seconds": seconds}
