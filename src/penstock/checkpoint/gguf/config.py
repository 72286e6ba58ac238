"""Converts the metadata of a GGUF file to the `config.json` of the same model's Hugging Face folder.

So each family has one config reader (`penstock.models`) for both formats. Unknown keys of the architecture are passed
on under their own names, so that the reader reports them.
"""

import math
import re
from collections.abc import Container
from typing import Any, Literal

from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.checkpoint.gguf.keys import NULL, Given, Keys
from penstock.checkpoint.gguf.rope import rope_scaling
from penstock.checkpoint.gguf.vocabulary import end_token_ids, suppressed_token_ids
from penstock.errors import CheckpointError, InvalidRequestError, shown

GGUFPooling = Literal["mean", "cls", "last", "rank"]
"""Pooling of an encoder's hidden states; rank: by a head, to the score of a query and a document."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_UNHEEDED = (
    *("general.sampling.sequence", "general.sampling.xtc_probability", "general.sampling.xtc_threshold"),
    *("general.sampling.penalty_last_n", "general.sampling.mirostat"),
)
"""Keys that change llama.cpp's sampling."""
_POOLINGS: dict[int, GGUFPooling] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""Values of `pooling_type` of encoders; 0: a generative model."""
SCORE_HEAD = "cls.output.weight"
"""A reranker's head; of a language model, the rows of the output projection for yes and no."""
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPERTS = {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}
_ALWAYS_FLOAT32 = re.compile(
    r".*\.(bias|ssm_(a|d)|(ssm_(conv1d|norm)|shortconv\.conv|ffn_gate_inp(_shexp)?|altup_.*_coef)\.weight)"
    r"|(position_embd|token_types)\.weight"
)
"""Tensors that llama.cpp's converter always writes as F32."""
_BLOCK = re.compile(r"blk\.(\d+)\.")
_MOST_HEAD_LAYERS = 64
"""Layers of a multi-token prediction head; models in use have 1."""


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """Look up `general.architecture`; returns its name and entry.

    Raises:
        CheckpointError: the architecture is unknown.
    """
    name = file.metadata.need("general.architecture", str)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has the unknown architecture {shown(name)}; supported: {', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The content of the equivalent `config.json`.

    Raises:
        CheckpointError: the architecture is unknown, or a key is missing, has the wrong type or an unsupported value.
    """
    name, architecture = architecture_of(file)
    keys = Keys(file.metadata, name)
    config: dict[str, Any] = {hf: keys.need(key, int) for key, hf in _SIZES.items()}
    config["num_hidden_layers"] = _num_layers(file, keys)
    by_layer = architecture.sizes_by_layer
    heads = config["num_attention_heads"] = keys.size("attention.head_count", by_layer=False)
    config["intermediate_size"] = keys.size("feed_forward_length", by_layer=by_layer)
    config["num_key_value_heads"] = keys.size("attention.head_count_kv", heads, by_layer=by_layer)
    config |= _head(keys, config["hidden_size"], heads, partial=architecture.partial_rope)
    config["rms_norm_eps"] = _epsilon(keys)
    config["rope_theta"] = keys.find("rope.freq_base", float)
    config["rope_scaling"] = rope_scaling(keys, file.tensors, config, stretches=architecture.yarn_mscale)
    config["architectures"] = [architecture.families[0]]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["vocab_size"] = _vocab_size(file)
    config["dtype"] = _dtype(file)
    config |= architecture.read(Given(keys, file.tensors, config))
    _pooling(keys, architecture, file.tensors)  # which `pooling_of` gives to who asks
    keys.expect("attention.causal", not architecture.bidirectional)
    if not _EXPERTS.intersection(config):
        keys.expect("expert_count", 0)
        keys.expect("expert_used_count", 0)
    given = {key: None if value is NULL else value for key, value in config.items() if value is not None}
    return given | dict.fromkeys(keys.unread(), True)


def pooling_of(file: GGUFFile) -> GGUFPooling | None:
    """The pooling of an encoder; None if the model generates text.

    Raises:
        CheckpointError: the pooling is unsupported.
    """
    name, architecture = architecture_of(file)
    return _pooling(Keys(file.metadata, name), architecture, file.tensors)


def _pooling(keys: Keys, architecture: Architecture, tensors: Container[str]) -> GGUFPooling | None:
    kind = keys.find("pooling_type", int) or 0
    ranks = architecture.bidirectional or SCORE_HEAD in tensors
    poolings = {number: name for number, name in _POOLINGS.items() if name != "rank" or ranks}
    if kind and kind not in poolings:
        known = ", ".join(f"{number} ({name})" for number, name in poolings.items())
        raise keys.unsupported("pooling_type", kind, f"supported: 0 (none), {known}")
    return _POOLINGS.get(kind)


def _num_layers(file: GGUFFile, keys: Keys) -> int:
    """Number of layers, without those of a multi-token prediction head, which files may count without storing them."""
    stored = len({match[1] for name in file.tensors if (match := _BLOCK.match(name))})
    count, of_head = keys.need("block_count", int), keys.find("nextn_predict_layers", int) or 0
    if not 0 <= of_head <= _MOST_HEAD_LAYERS:
        raise keys.unsupported("nextn_predict_layers", of_head, f"it must be from 0 to {_MOST_HEAD_LAYERS}")
    if not 1 <= count - of_head <= stored:
        raise keys.unsupported("block_count", count, f"the file has the tensors of {stored} blocks")
    return count - of_head


def _epsilon(keys: Keys) -> float:
    """Epsilon of the norms; Nemotron-H's files have only `layer_norm_epsilon`."""
    rms, other = (keys.find(f"attention.layer_norm_{name}", float) for name in ("rms_epsilon", "epsilon"))
    if rms is None and other is not None:
        return other
    return keys.need("attention.layer_norm_rms_epsilon", float)


def _head(keys: Keys, hidden_size: int, heads: int, *, partial: bool) -> dict[str, Any]:
    """The head size and, with `partial`, the fraction of a head that RoPE rotates."""
    if heads < 1:
        raise keys.unsupported("attention.head_count", heads, "it must be at least 1")
    head_dim = keys.find("attention.key_length", int) or hidden_size // heads
    if keys.find("attention.kv_lora_rank", int) is None:
        keys.expect("attention.value_length", head_dim)
    if not partial:
        keys.expect("rope.dimension_count", head_dim)
        return {"head_dim": head_dim}
    rotated = keys.find("rope.dimension_count", int) or head_dim
    return {"head_dim": head_dim, "partial_rotary_factor": partial_rotary(head_dim, rotated)}


def partial_rotary(head_dim: int, rotated: int) -> float:
    """The `partial_rotary_factor` with which `rotated` elements of a head are rotated."""
    fraction = rotated / max(head_dim, 1)
    return math.nextafter(fraction, 2.0) if int(head_dim * fraction) < rotated else fraction  # as for 52 of 92


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """The matrices' dtype if all share one floating-point type; otherwise float32, which represents every stored type.

    Rounding activations to bfloat16 would lose a quantized model as much accuracy again as its kernels' rounding to
    int8 does.
    """
    matrices = (info for info in file.tensors.values() if len(info.shape) > 1)
    types = {info.type.name for info in matrices if not _ALWAYS_FLOAT32.fullmatch(info.name)}
    return _FLOATS.get(types.pop(), "float32") if len(types) == 1 else "float32"


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of the equivalent `generation_config.json`: end-of-text and suppressed tokens, sampling defaults.

    Raises:
        CheckpointError: a key has the wrong type, or a value is out of range.
    """
    found: dict[str, Any] = {"eos_token_id": end_token_ids(file.metadata)}
    if suppressed := suppressed_token_ids(file.metadata):
        found["suppress_tokens"] = suppressed
    for key, name in _SAMPLING.items():
        value = file.metadata.find(key, int if name == "top_k" else float)
        if value is not None:
            found |= _sampling_default(file, key, {name: max(value, 0) if name == "top_k" else value})
    return found


def unheeded_keys(file: GGUFFile) -> tuple[str, ...]:
    """Keys of the file that change the answers of llama.cpp but not Penstock's."""
    present = set(file.metadata.below(""))
    return tuple(key for key in _UNHEEDED if key in present)


def _sampling_default(file: GGUFFile, key: str, default: dict[str, Any]) -> dict[str, Any]:
    try:
        SamplingParams(**default)
    except InvalidRequestError as error:
        raise CheckpointError(f"{key} in {file.path}: {error}") from None
    return default
