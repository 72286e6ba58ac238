"""Checkpoints with a multi-token prediction head, which `transformers` neither writes nor computes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.kernels.reference_ops import reference_ops
from penstock.models.decoder import Decoder
from penstock.models.mtp import MTPHead
from penstock.models.registry import read_spec
from penstock.quantization.base import Unquantized, WeightFactory
from tests.support.checkpoints import write_random, write_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": SHAPE["n_routed_experts"], "shared_expert_intermediate_size": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "num_key_value_heads": 4,
    },
    "Glm4Moe": {"head_dim": 16, "num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True},
    "Qwen3_5": _DELTA,
    "Qwen3_5Moe": _DELTA | _EXPERTS,
    "Qwen3Next": _DELTA | _EXPERTS,
}
HYBRIDS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
_KEYS = {"Qwen3_5": "mtp_num_hidden_layers", "Qwen3_5Moe": "mtp_num_hidden_layers"}


def write_with_head(folder: Path, family: str, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    """A random model with a random head and a tokenizer; returns `transformers`' model, and the head's tensors."""
    key = _KEYS.get(family, "num_nextn_predict_layers")
    model = write_random(folder, family, **(SHAPE | FAMILIES[family] | {key: 1} | changes))
    write_tokenizer(folder, SHAPE["vocab_size"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 1}))
    generator = torch.Generator().manual_seed(1)
    head = {
        name: 0.2 * torch.randn(shape, generator=generator) + ("norm" in name)
        for name, shape in _head_shapes(folder).items()
    }
    weights = load_file(folder / "model.safetensors")
    last = f"model.layers.{SHAPE['num_hidden_layers']}"
    copies = {f"{last}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}  # as published files have it
    if family in HYBRIDS:
        copies = {}
    stored = _stacked(head) if family == "Qwen3_5Moe" else head
    save_file(weights | stored | copies, folder / "model.safetensors", metadata={"format": "pt"})
    return model, head


def _stacked(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """With all experts in one tensor, and gate and up in one, as Qwen3.5's published files have them."""
    above, experts = "mtp.layers.0.mlp.experts.", range(SHAPE["n_routed_experts"])

    def stack(part: str) -> Tensor:
        return torch.stack([head[f"{above}{expert}.{part}.weight"] for expert in experts])

    rest = {name: tensor for name, tensor in head.items() if not name.startswith(above)}
    gate_up = torch.cat((stack("gate_proj"), stack("up_proj")), 1)
    return rest | {f"{above}gate_up_proj": gate_up, f"{above}down_proj": stack("down_proj")}


def _head_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    spec, ops = read_spec(open_checkpoint(str(folder))), reference_ops()
    assert spec.mtp is not None
    target, factory = (WeightFactory(Unquantized(), ops, torch.float32, torch.device("cpu")) for _ in range(2))
    MTPHead(spec.mtp, Decoder(spec, 8, target), 8, factory)
    return {name: parameter.shape for name, parameter in factory.parameters.items()}
