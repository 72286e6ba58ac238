"""The model config of a GGUF file, as the `config.json` that the same model has as a Hugging Face folder.

So a family's reader (`penstock.models`) is the same for both. Keys of the architecture that are not known here are
passed on under their own names: whoever reads the config reports them.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import CheckpointError, shown
from penstock.gguf.file import GGUFFile, Metadata
from penstock.gguf.header import TensorInfo
from penstock.gguf.vocabulary import end_token_ids

T = TypeVar("T", bool, int, float, str)

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
_WITHOUT_EFFECT = {
    *("vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"),
}
"""Keys that repeat what is said elsewhere."""
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ROPE_FACTORS = "rope_freqs.weight"


class _Keys:
    """The metadata of one architecture, remembering what was read."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self._metadata, self._prefix = metadata, architecture + "."
        self._read = set(_WITHOUT_EFFECT)

    def find(self, key: str, kind: type[T]) -> T | None:
        self._read.add(key)
        return self._metadata.find(self._prefix + key, kind)

    def need(self, key: str, kind: type[T]) -> T:
        self._read.add(key)
        return self._metadata.need(self._prefix + key, kind)

    def expect(self, key: str, value: T) -> None:
        """Refuse any other value of `key`; an absent one is right."""
        given = self.find(key, type(value))
        if given is not None and given != value:
            raise self.unsupported(key, given, f"only {shown(value)} is")

    def unsupported(self, key: str, given: object, supported: str) -> CheckpointError:
        return CheckpointError(
            f"{self._prefix}{key} {shown(given)} in {self._metadata.file} is not supported; {supported}"
        )

    def unread(self) -> list[str]:
        return [self._prefix + key for key in self._metadata.below(self._prefix) if key not in self._read]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one of llama.cpp's architectures is in `transformers`, and how its files differ."""

    family: str
    interleaved_rope: bool
    """Whether the rows of queries and keys are in the order of interleaved rotary pairs (0 h/2 1 h/2+1 ...)."""
    read: Callable[[_Keys, Mapping[str, TensorInfo]], dict[str, Any]]
    """What the family has beyond the keys of all."""


def _read_llama(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    window = keys.find("attention.sliding_window", int)
    if experts := _read_experts(keys):
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": window, **experts}
    if window is not None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors or "blk.0.ffn_down.bias" in tensors,
    }


def _read_granite(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        **_read_llama(keys, tensors),
        "embedding_multiplier": keys.find("embedding_scale", float),
        "attention_multiplier": keys.need("attention.scale", float),
        "residual_multiplier": keys.find("residual_scale", float),
        "logits_scaling": keys.find("logit_scale", float),
    }


def _read_qwen3(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


def _read_qwen3_moe(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    inner = keys.find("expert_feed_forward_length", int)
    return {
        **_read_qwen3(keys, tensors),
        **_read_experts(keys),
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }


def _read_experts(keys: _Keys) -> dict[str, Any]:
    """How many experts there are, and how many a token meets; nothing where there are none."""
    experts = keys.find("expert_count", int)
    if not experts:
        keys.expect("expert_used_count", 0)
        return {}
    return {"num_local_experts": experts, "num_experts_per_tok": keys.need("expert_used_count", int)}


def _read_olmo2(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    window = keys.find("attention.sliding_window", int)
    if window is not None:  # OLMo 3, under the same name
        raise keys.unsupported("attention.sliding_window", window, "it must be absent")
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


def _read_smollm3(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", True, _read_llama),
    "granite": Architecture("GraniteForCausalLM", True, _read_granite),
    "olmo2": Architecture("Olmo2ForCausalLM", False, _read_olmo2),
    "qwen2": Architecture("Qwen2ForCausalLM", False, lambda keys, tensors: {}),
    "qwen3": Architecture("Qwen3ForCausalLM", False, _read_qwen3),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", False, _read_qwen3_moe),
    "smollm3": Architecture("SmolLM3ForCausalLM", True, _read_smollm3),
}
"""By `general.architecture`. Files of Mistral's models name llama."""


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """The name and kind of the model.

    Raises:
        CheckpointError: it is unknown.
    """
    name = file.metadata.need("general.architecture", str)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} is of the architecture {shown(name)}, which is unknown; known are {', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def model_config(file: GGUFFile) -> dict[str, Any]:
    """What `config.json` would hold.

    Raises:
        CheckpointError: the architecture is unknown, or a key is missing, of a wrong type or of a value that is not
            supported.
    """
    name, architecture = architecture_of(file)
    keys = _Keys(file.metadata, name)
    config: dict[str, Any] = {hf: keys.need(key, int) for key, hf in _SIZES.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.find("attention.head_count_kv", int) or heads
    config["head_dim"] = _head_dim(keys, config["hidden_size"], heads)
    config["rms_norm_eps"] = keys.need("attention.layer_norm_rms_epsilon", float)
    config["rope_theta"] = keys.find("rope.freq_base", float)
    config["rope_scaling"] = _rope_scaling(keys, file.tensors, config)
    config["architectures"] = [architecture.family]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["vocab_size"] = _vocab_size(file)
    config["dtype"] = _dtype(file)
    config |= architecture.read(keys, file.tensors)
    if "num_local_experts" not in config:
        keys.expect("expert_count", 0)
        keys.expect("expert_used_count", 0)
    given = {key: value for key, value in config.items() if value is not None}
    return given | dict.fromkeys(keys.unread(), True)


def _head_dim(keys: _Keys, hidden_size: int, heads: int) -> int:
    if heads < 1:
        raise keys.unsupported("attention.head_count", heads, "it must be at least 1")
    head_dim = keys.find("attention.key_length", int) or hidden_size // heads
    keys.expect("attention.value_length", head_dim)
    keys.expect("rope.dimension_count", head_dim)
    return head_dim


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """That of the matrices if all are floating point of one type; else float32, which holds all that is stored.

    Rounding activations to bfloat16 would cost a quantized model as much again as its kernels' rounding them to int8.
    """
    types = {info.type.name for info in file.tensors.values() if len(info.shape) > 1}
    return _FLOATS.get(types.pop(), "float32") if len(types) == 1 else "float32"


def _rope_scaling(keys: _Keys, tensors: Mapping[str, TensorInfo], config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` as `transformers` writes it. Llama 3's comes as a factor for each frequency, in a tensor."""
    kind = keys.find("rope.scaling.type", str)
    factor = keys.find("rope.scaling.factor", float) or keys.find("rope.scale_linear", float) or 1.0
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.expect("rope.scaling.yarn_log_multiplier", 0.0)
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", kind, "none, linear and yarn are")
    stretched = kind != "none" and factor != 1.0
    factors = tensors.get(ROPE_FACTORS)
    if factors is not None:
        if stretched:
            raise keys.unsupported("rope.scaling.type", kind, f"not together with the tensor {ROPE_FACTORS}")
        return {"rope_type": "frequency_factors", "frequency_factors": _read_factors(factors, config["head_dim"])}
    if not stretched:
        return None
    if kind == "yarn":
        return _yarn(keys, factor, config)
    return {"rope_type": "linear", "factor": factor}


def _yarn(keys: _Keys, factor: float, config: dict[str, Any]) -> dict[str, Any]:
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    keys.expect("rope.scaling.yarn_attn_factor", 1.0)
    original = keys.find("rope.scaling.original_context_length", int) or config["max_position_embeddings"]
    given = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.find("rope.scaling.yarn_beta_fast", float),
        "beta_slow": keys.find("rope.scaling.yarn_beta_slow", float),
    }
    return {key: value for key, value in given.items() if value is not None}


def _read_factors(info: TensorInfo, head_dim: int) -> list[float]:
    what = f"the tensor {info.name} in {info.file}"
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{what} must be of type F32 and shape [{head_dim // 2}], not {info.type.name} {list(info.shape)}"
        )
    with info.file.open("rb") as file:
        file.seek(info.first)
        content = file.read(info.nbytes)
    factors = list(struct.unpack(f"<{head_dim // 2}f", content))
    if not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(f"{what} must hold numbers above 0")
    return factors


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """What `generation_config.json` would hold: tokens that end a text, and defaults of sampling.

    Raises:
        CheckpointError: a key is of a wrong type or names a token that there is not.
    """
    metadata = file.metadata
    found: dict[str, Any] = {"eos_token_id": end_token_ids(metadata)}
    for key, name in _SAMPLING.items():
        value = metadata.find(key, int if name == "top_k" else float)
        if value is not None:
            found[name] = value
    return found
