"""Builds an engine from its options."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.api.request import MediaKind, Request
from penstock.checkpoint.adapters.adaptable import Adaptable
from penstock.checkpoint.audio_input import read_audio_input
from penstock.checkpoint.checkpoint import Checkpoint, open_model
from penstock.checkpoint.created import version_of
from penstock.config.engine_config import AdapterConfig, EngineConfig
from penstock.config.image_input import ImageInput
from penstock.config.machine import Machine
from penstock.config.model_facts import BYTES_OF, ModelFacts, TowerFacts
from penstock.config.settings import Settings, resolve
from penstock.core.build import make_scheduler
from penstock.engine.adapters import AdapterRoom, AdapterRunner
from penstock.engine.core import EngineCore, ModelRunner, PendingRequests
from penstock.engine.drafting import make_drafters, make_speculation, open_draft_checkpoint
from penstock.engine.info import EngineInfo
from penstock.engine.memory_line import disk_part, memory_line
from penstock.engine.other_backend import read_other_facts, without_kernels
from penstock.errors import ConfigError
from penstock.kernels.lora import MAX_SLOTS
from penstock.layers.encoder_head import TokenScoreSpec
from penstock.models.encoders import read_encoder, task_of
from penstock.models.loading.packed_key import packed_cache
from penstock.models.registry import read_facts, read_mtp_facts, read_spec
from penstock.models.sizes import adaptable
from penstock.native.array import NoNativeKernelError
from penstock.runner.fingerprint import arithmetic
from penstock.runner.machine import detect_machine
from penstock.runner.runners import start_head, start_runner
from penstock.structured.masks import Grammars
from penstock.system.start import Start

if TYPE_CHECKING:
    from penstock.api.request import Adapter
    from penstock.core.block_tier import BlockTier
    from penstock.core.kv_manager import KVManager
    from penstock.engine.encoder_core import EncoderCore
    from penstock.engine.process import Core
    from penstock.runner.mtp_runner import MTPRunner
    from penstock.structured.vocabulary import Vocabulary

MakeRunner = Callable[[Checkpoint, Settings], ModelRunner]
T = TypeVar("T")


def build_engine(
    config: EngineConfig,
    *,
    make_runner: MakeRunner | None = None,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.monotonic,
    start: Start | None = None,
) -> EngineCore:
    """Build an engine and load its model.

    Args:
        make_runner: builds the runner of the model, and of the draft model, if there is one; None: `start_runner`.
        machine: the hardware for the memory plan; None: this machine.
        clock: seconds, for all timing in the engine.
        start: what was prepared for loading the model.

    Raises:
        ConfigError: the options, the checkpoint and the machine are incompatible.
    """
    build = partial(_build_engine, config, make_runner, clock, start or Start())
    return _whole(build, machine or detect_machine(config.model.device))


def _whole(build: Callable[[Machine], T], machine: Machine) -> T:
    """Build with native kernels, or, if the model uses an operation that they lack, with the reference alone.

    Only a family of one's own has a gap that settings do not foresee: its calls are seen when they are recorded, which
    takes the addresses of loaded weights. The memory plan is made anew, as the reference's weights are larger.
    """
    try:
        return build(machine)
    except NoNativeKernelError as error:
        gap = str(error)
    return build(machine.without_native_kernels(gap))  # here, where the traceback no longer holds the model


def _build_engine(
    config: EngineConfig,
    make_runner: MakeRunner | None,
    clock: Callable[[], float],
    start: Start,
    machine: Machine,
) -> EngineCore:
    checkpoint = open_model(config.model)
    is_ours = config.model.backend == "penstock"
    if is_ours:
        facts = read_facts(checkpoint, ranks=config.model.tensor_parallel_size)
    else:
        facts, machine = read_other_facts(config, checkpoint), without_kernels(machine)
    if facts.is_encoder:
        raise ConfigError(f"{facts.name} embeds or scores; this needs a model that generates")
    image_input = _image_input(config, checkpoint, facts)
    facts = replace(facts, towers=_wanted(config, facts, image_input))
    draft = open_draft_checkpoint(config.speculation, checkpoint)
    make_runner = make_runner or partial(start_runner, start=start)
    if config.speculation.speculation == "mtp":
        draft_facts = read_mtp_facts(checkpoint, ranks=config.model.tensor_parallel_size)
    else:
        draft_facts = None if draft is None else read_facts(draft)
    takes = _adaptable(checkpoint) if is_ours else Adaptable({})
    elements = sum(adapter.num_elements for adapter in _listed_adapters(config.adapters, takes))
    # All sizes are known and nothing is loaded: what does not fit is refused in milliseconds.
    settings = resolve(config, facts, machine, draft_facts, elements)
    runner, draft_runner = _load_runners(checkpoint, draft, settings, make_runner)
    load_vocabulary = partial(_load_vocabulary, checkpoint, facts.vocab_size)
    grammars = Grammars(load_vocabulary, facts.vocab_size, settings.max_num_seqs)
    adapters = _adapter_room(settings, runner)
    speculation = make_speculation(settings, make_drafters(settings, draft_runner, grammars), clock)
    info = replace(
        _describe(checkpoint, facts, settings, takes),
        image_input=image_input,
        audio_input=read_audio_input(checkpoint),
    )
    if not {"audio_config", "thinker_config"}.isdisjoint(checkpoint.config):
        info = _with_sounds(info, checkpoint, facts)
    make_tier = _tier_maker(settings, info.arithmetic, runner, clock)
    return EngineCore(
        info,
        settings,
        make_scheduler(settings, speculation, clock, make_tier),
        runner,
        grammars,
        PendingRequests(lambda request: _awaited(request, grammars, adapters), grammars.drop),
        clock,
        draft_runner=draft_runner,
        adapters=adapters,
    )


def _adapter_room(settings: Settings, runner: ModelRunner) -> AdapterRoom | None:
    """None: no memory was planned for adapters."""
    if not settings.memory.adapters:
        return None
    assert isinstance(runner, AdapterRunner), "this runner takes no adapters"
    return AdapterRoom(runner, settings.memory.adapters // BYTES_OF[settings.dtype])


def _adaptable(checkpoint: Checkpoint) -> Adaptable:
    """What adapters can add to; their sizes matter before the dtype is known."""
    if checkpoint.gguf is None:
        return adaptable(read_spec(checkpoint), "float32")
    from penstock.checkpoint.gguf.config import architecture_of  # here: a folder has no need of it

    name, architecture = architecture_of(checkpoint.gguf)
    if architecture.has_factors:
        return Adaptable({})
    return replace(adaptable(read_spec(checkpoint), "float32"), architecture=name)


def _listed_adapters(config: AdapterConfig, takes: Adaptable) -> "list[Adapter]":
    """The adapters of the options.

    Raises:
        AdapterError: one cannot be used.
    """
    if not config.paths:
        return []
    from penstock.checkpoint.adapters.folder import read_adapter  # here: most starts read none

    return [read_adapter(name, path, takes).adapter for name, path in config.paths.items()]


def _tier_maker(
    settings: Settings, arithmetic: str, runner: ModelRunner, clock: Callable[[], float]
) -> "Callable[[KVManager], BlockTier] | None":
    """A factory of the tier below the prefix cache; None: blocks stay in memory. Raises as `tier_maker` does."""
    if not settings.moves_blocks:
        return None
    from penstock.engine.block_tier import tier_maker  # here: most engines have none

    return tier_maker(settings, arithmetic, runner.blocks, clock)


def _load_runners(
    checkpoint: Checkpoint, draft: Checkpoint | None, settings: Settings, make_runner: MakeRunner
) -> "tuple[ModelRunner, ModelRunner | MTPRunner | None]":
    """The model's runner, and that of its draft model or head, if there is one."""
    runner, speculation = make_runner(checkpoint, settings), settings.speculation
    if speculation is None or speculation.draft is None:
        return runner, None
    try:
        if speculation.mtp:
            return runner, start_head(runner, checkpoint, speculation.draft)
        return runner, None if draft is None else make_runner(draft, speculation.draft)
    except BaseException:
        runner.close()  # its ranks are processes
        raise


def build_encoder(
    config: EngineConfig,
    *,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.monotonic,
    start: Start | None = None,
) -> "EncoderCore":
    """Build an engine for an embedding model or reranker, and load its model. See `build_engine`."""
    build = partial(_build_encoder, config, clock, start or Start())
    return _whole(build, machine or detect_machine(config.model.device))


def _build_encoder(config: EngineConfig, clock: Callable[[], float], start: Start, machine: Machine) -> "EncoderCore":
    from penstock.engine.encoder_core import EncoderCore  # here: an engine that generates has no need of them
    from penstock.runner.encoder_runner import EncoderRunner

    checkpoint = open_model(config.model)
    facts, spec = read_facts(checkpoint), read_spec(checkpoint)
    settings = resolve(config, facts, machine)
    about = read_encoder(checkpoint)
    assert about is not None
    assert spec.encoder is not None
    if config.adapters != AdapterConfig():
        raise ConfigError("adapters are added to models that generate: leave adapter and adapter_memory out")
    info = _describe(checkpoint, facts, settings, None)
    is_asked = any(isinstance(part, TokenScoreSpec) for part in spec.encoder.head)
    info = replace(info, encoder=replace(about, vector_size=spec.encoder.vector_size, is_asked=is_asked))
    return EncoderCore(info, settings, EncoderRunner(checkpoint, settings, start), clock)


def build(config: EngineConfig, start: Start | None = None) -> "EngineCore | EncoderCore":
    """Build the engine for the model's task. Raises the same errors as `build_engine`."""
    generates = config.model.backend != "penstock" or task_of(open_model(config.model)) == "generate"
    return build_engine(config, start=start) if generates else build_encoder(config, start=start)


if TYPE_CHECKING:
    _driven: Callable[[EngineConfig, Start], Core] = build  # type check: both kinds of engine can be driven by the loop


def _load_vocabulary(checkpoint: Checkpoint, size: int) -> "Vocabulary":
    from penstock.structured.vocabulary import Vocabulary  # its library takes 20 ms that most starts do not need

    return Vocabulary.of_checkpoint(checkpoint.path, size)


def _awaited(request: Request, grammars: Grammars, adapters: AdapterRoom | None) -> list[Future[Any]]:
    """Futures that must be done before the scheduler accepts a request."""
    structured = request.params.structured
    awaited: list[Future[Any]] = [] if structured is None else [grammars.compile(structured, request.tenant)]
    if request.adapter is not None:
        assert adapters is not None, "a request has an adapter, and no memory is planned for any"
        loading = adapters.need(request.adapter)
        if loading is not None:
            awaited.append(loading)
    return awaited


MAX_IMAGE_TOKENS = 4096
"""Default of `max_image_tokens`: with four times as many, as some checkpoints allow, the tower's memory is 5 GiB, and a
picture takes minutes on a CPU.
"""
_SIZED = ("qwen2_vl", "pixtral")
"""Processors by which the size of a picture determines its number of tokens."""


def _image_input(config: EngineConfig, checkpoint: Checkpoint, facts: ModelFacts) -> ImageInput | None:
    """How the model takes images; None: it has no vision tower, or is to take none."""
    if "image" not in facts.towers or not (config.images.media and config.images.images):
        return None
    from penstock.checkpoint.image_input import read_image_input  # here: few models have a tower

    found, most = read_image_input(checkpoint), config.images.max_image_tokens
    if found is None:
        return None
    if most is None and found.processor not in _SIZED:
        return found
    most = most or MAX_IMAGE_TOKENS
    return replace(found, max_tokens=min(most, found.max_tokens) if found.max_tokens else most)


def _with_sounds(info: EngineInfo, checkpoint: Checkpoint, facts: ModelFacts) -> EngineInfo:
    """`info` with the settings of the model's audio encoder."""
    from penstock.checkpoint.sound_input import read_sound_input, unsupported_encoder  # here: few models have one

    return replace(
        info,
        sound_input=read_sound_input(checkpoint) if "sound" in facts.towers else None,
        unsupported_encoder=unsupported_encoder(checkpoint),
    )


def _wanted(config: EngineConfig, facts: ModelFacts, image_input: ImageInput | None) -> Mapping[MediaKind, TowerFacts]:
    """The facts of the encoders that the options leave in.

    Raises:
        ConfigError: the model transcribes, for which it needs its encoder.
    """
    towers = dict(facts.towers)
    if (vision := towers.pop("image", None)) is not None and image_input is not None:
        towers = {"image": _limited(vision, image_input), **towers}
    if config.images.media and config.audio.sounds:
        return towers
    if (audio := towers.pop("sound", None)) is not None and audio.is_attended:
        option = "sounds" if config.images.media else "media"
        raise ConfigError(f"{option}: {facts.name} transcribes, for which it needs its audio encoder: leave it on")
    return towers


def _limited(tower: TowerFacts, image_input: ImageInput) -> TowerFacts:
    """A tower's facts for pictures of at most `ImageInput.max_tokens`, where the family lets their size choose."""
    most = image_input.max_tokens
    if not most or most >= tower.max_tokens or image_input.processor not in _SIZED:
        return tower
    return replace(tower, max_tokens=most, max_patches=most * image_input.merge_size**2)


def _describe(checkpoint: Checkpoint, facts: ModelFacts, settings: Settings, takes: Adaptable | None) -> EngineInfo:
    return EngineInfo(
        model_name=settings.model_name,
        model_path=str(checkpoint.path),
        model_version=version_of(checkpoint.path),
        vocab_size=facts.vocab_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        seed=settings.seed,
        defaults=checkpoint.generation,
        memory_plan=memory_line(settings.memory, device=settings.device, ranks=settings.tensor_parallel_size)
        + disk_part(packed_cache(settings)),
        memory_bytes=settings.memory.num_bytes * settings.tensor_parallel_size,
        image_pixels=settings.memory.image_pixels,
        num_blocks=settings.memory.num_blocks,
        block_size=settings.memory.block_size,
        max_batch_total_tokens=settings.admission.max_batch_total_tokens if settings.admission else None,
        device=settings.device,
        dtype=settings.dtype,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        adaptable=replace(takes, dtype=settings.dtype) if takes is not None and settings.memory.adapters else None,
        max_adapter_elements=settings.memory.adapters // BYTES_OF[settings.dtype],
        max_adapters=MAX_SLOTS if settings.memory.adapters else 0,
        arithmetic=arithmetic(checkpoint, settings),
        role=settings.role,
        hf_overrides=checkpoint.hf_overrides,
    )
