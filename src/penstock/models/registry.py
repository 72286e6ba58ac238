"""Which architecture is which family, and how a checkpoint becomes a model. Importing it loads no torch.

Checkpoint ──read_config──> DecoderConfig ──read_facts──> ModelFacts (for `config.resolve`)
                                          └──load_model──> Decoder with its weights
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.checkpoint import Checkpoint, weight_files
from penstock.config import Settings
from penstock.errors import CheckpointError
from penstock.gguf.file import GGUFFile
from penstock.memory import ModelFacts
from penstock.models.decoder_config import DecoderConfig
from penstock.models.gguf_scheme import read_gguf_scheme
from penstock.models.granite import granite_config
from penstock.models.hf_config import HFConfig
from penstock.models.hf_quantization import read_scheme
from penstock.models.llama import llama_config
from penstock.models.mistral import mistral_config
from penstock.models.qwen2 import qwen2_config
from penstock.models.qwen3 import qwen3_config
from penstock.quantization.scheme import GGUFScheme

if TYPE_CHECKING:
    from penstock.kernels.ops import Ops
    from penstock.models.loader import WeightFile
    from penstock.models.model import Model

ARCHITECTURES: dict[str, Callable[[HFConfig], DecoderConfig]] = {
    "GraniteForCausalLM": granite_config,
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
}


def read_config(checkpoint: Checkpoint) -> DecoderConfig:
    """What the checkpoint's model is made of.

    Raises:
        CheckpointError: its architecture is unknown, or its config needs something that we do not implement.
    """
    return _read(checkpoint, HFConfig(checkpoint))


def _read(checkpoint: Checkpoint, config: HFConfig) -> DecoderConfig:
    architectures = config.find("architectures", list) or []
    known = next((name for name in ARCHITECTURES if name in architectures), None)
    if known is None:
        named = ", ".join(map(str, architectures[:4])) or "none"
        raise CheckpointError(
            f"{config.file} names the architecture {named}, which is unknown; known are {', '.join(ARCHITECTURES)}"
        )
    decoder = ARCHITECTURES[known](config)
    _check_shape(decoder, config)
    if checkpoint.gguf is not None:
        _check_elements(decoder, checkpoint.gguf)
        return replace(decoder, quantization=read_gguf_scheme(checkpoint.gguf, decoder.matrices()))
    return replace(decoder, quantization=read_scheme(config))


def _check_shape(decoder: DecoderConfig, config: HFConfig) -> None:
    """Refuse sizes that no model can have."""
    if decoder.num_kv_heads < 1 or decoder.num_heads % decoder.num_kv_heads:
        raise CheckpointError(
            f"{config.file}: {decoder.num_heads} query heads cannot share {decoder.num_kv_heads} key heads evenly"
        )
    if decoder.rope.dim < 2 or decoder.rope.dim % 2 or decoder.rope.dim > decoder.head_dim:
        raise CheckpointError(
            f"{config.file}: rotary positions turn an even number of a head's {decoder.head_dim} elements, "
            f"head_dim times partial_rotary_factor; not {decoder.rope.dim}"
        )


def _check_files(decoder: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Refuse a config whose model the weight files cannot hold, before anything of its size is planned or made."""
    if checkpoint.gguf is not None:
        return  # its header names every tensor
    stored = sum(file.stat().st_size for file in weight_files(checkpoint.path))
    matrices = decoder.matrices()
    elements = sum(matrix.rows * matrix.columns for matrix in matrices)
    needed = sum(matrix.rows * matrix.columns * matrix.format.bits // 8 for matrix in matrices)
    needed += 2 * (decoder.num_parameters - elements)
    if needed > stored:
        raise CheckpointError(
            f"{checkpoint.config_file} describes a model of {decoder.num_parameters} parameters, at least "
            f"{needed} bytes, but the weight files hold {stored}: they are incomplete, or one of these is wrong: "
            f"{_sizes(decoder)}"
        )


def _check_elements(decoder: DecoderConfig, gguf: GGUFFile) -> None:
    stored = sum(info.size for info in gguf.tensors.values())
    if decoder.num_parameters > stored:
        raise CheckpointError(
            f"{gguf.path} describes a model of {decoder.num_parameters} parameters, but its tensors have {stored} "
            f"elements: some are missing, or one of these is wrong: {_sizes(decoder)}"
        )


def _sizes(decoder: DecoderConfig) -> str:
    return (
        f"vocab_size {decoder.vocab_size}, hidden_size {decoder.hidden_size}, intermediate_size "
        f"{decoder.intermediate_size}, num_hidden_layers {decoder.num_layers}, num_attention_heads "
        f"{decoder.num_heads}, num_key_value_heads {decoder.num_kv_heads}, head_dim {decoder.head_dim}"
    )


def read_facts(checkpoint: Checkpoint, *, with_weights: bool = True) -> ModelFacts:
    """What the engine's settings depend on.

    Args:
        with_weights: whether the weights must be there; a simulation needs the config alone.

    Raises:
        CheckpointError: as `read_config`; also if there are no weights, or too few for the sizes that the config names.
    """
    config = read_config(checkpoint)
    if with_weights:
        _check_files(config, checkpoint)
    scheme = config.quantization
    return ModelFacts(
        name=checkpoint.name,
        dtype=config.dtype,
        num_parameters=config.num_parameters,
        max_position=config.max_position,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        sliding_windows=config.sliding_windows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        matrices=tuple(config.matrices()),
        stored_format=scheme.format if scheme else None,
        kv_dtype="float16" if isinstance(scheme, GGUFScheme) else None,
    )


def load_model(checkpoint: Checkpoint, settings: Settings, ops: "Ops") -> "Model":
    """The model with its weights, in the settings' dtype on their device; it computes with `ops`.

    Raises:
        CheckpointError: the config or the weights are damaged, incomplete or of an unknown kind.
    """
    import torch  # here, not above: the server process reads facts and never computes

    from penstock.models.loader import load_weights
    from penstock.quantization.base import WeightFactory
    from penstock.quantization.methods import make_method

    given = HFConfig(checkpoint)
    config = _read(checkpoint, given)
    given.warn_of_unread()  # here, as this is done once for each model
    factory = WeightFactory(
        make_method(settings.quantization, config.quantization, ops),
        ops,
        getattr(torch, settings.dtype),
        torch.device(settings.device),
    )
    model = config.build(config, settings.max_model_len, factory)
    load_weights(open_weights(checkpoint, config, factory.parameters), factory.parameters, model.ignored_tensors())
    return model


def open_weights(checkpoint: Checkpoint, config: DecoderConfig, parameters: Iterable[str]) -> "list[WeightFile]":
    """The files of a checkpoint's weights, in which the model's parameters are found by their names."""
    if checkpoint.gguf is not None:
        from penstock.models.gguf_weights import gguf_weight_files

        return list(gguf_weight_files(checkpoint.gguf, config.head_dim, parameters))
    from penstock.models.safetensors_weights import SafetensorsFile

    return [SafetensorsFile(file) for file in weight_files(checkpoint.path)]
