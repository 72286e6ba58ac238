"""The precision in which a model computes, and in which its weights and its cache are stored."""

from dataclasses import replace
from typing import cast

from penstock.config.byte_counts import parse_bytes
from penstock.config.engine_config import EngineConfig
from penstock.config.footprint import widen_weights
from penstock.config.machine import Machine
from penstock.config.model_facts import DType, KVDType, KVSpec, ModelFacts, ModelPrecision
from penstock.errors import ConfigError


def model_precisions(
    config: EngineConfig, machine: Machine, facts: ModelFacts, draft_facts: ModelFacts | None
) -> list[ModelPrecision]:
    """The model, and its draft model, if any."""
    quantization = config.model.quantization
    mtp = config.speculation.speculation == "mtp"
    target = replace(precision_of(facts, config, machine, quantization), keeps_hidden=mtp)
    if draft_facts is None:
        return [target]
    return [target, precision_of(draft_facts, config, machine, quantization if mtp else None)]


def widened(config: EngineConfig, machine: Machine, models: list[ModelPrecision]) -> list[ModelPrecision]:
    """The models, with weights in float32 if the machine lacks native kernels and has enough memory."""
    kv_cache, ranks = config.cache.kv_cache_memory, config.model.tensor_parallel_size
    free = machine.memory - (0 if kv_cache == "auto" else parse_bytes(kv_cache))
    return widen_weights(models, replace(machine, memory=free // ranks))


def precision_of(facts: ModelFacts, config: EngineConfig, machine: Machine, quantization: str | None) -> ModelPrecision:
    """The precision of one model, by the options, its checkpoint and the machine.

    Raises:
        ConfigError: a recipe is chosen for a checkpoint that is already quantized.
    """
    if quantization is not None and facts.stored_format is not None:
        raise ConfigError(
            f"quantization={quantization} needs a floating-point checkpoint; this one is already quantized "
            f"({facts.stored_format}): leave the option out"
        )
    dtype = facts.dtype if config.model.dtype == "auto" else cast(DType, config.model.dtype)
    # Activations of some models exceed float16's range; the CPU kernels multiply in float32 anyway.
    float16_weights = dtype == "float16" and machine.device == "cpu"
    if float16_weights:
        dtype = "float32"
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        has_latents = any(isinstance(cache, KVSpec) and cache.latent for cache in facts.caches)
        if quantization is not None and machine.native and not has_latents:
            wanted = "int8"
        elif facts.halves_kv or float16_weights:
            wanted = "bfloat16" if machine.multiplies_bfloat16 else "float16"
        else:
            wanted = dtype
    return ModelPrecision(facts, dtype, cast(KVDType, wanted), quantization, float16_weights)
