"""The registry of model families by architecture, and the loading of checkpoints. Does not import torch.

Checkpoint ──read_spec──> ModelSpec ──read_facts──> ModelFacts (for `settings.resolve`)
                                    └──load_model──> Decoder with its weights
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpoint.checkpoint import Checkpoint, weight_files
from penstock.config.model_facts import ActivationSizes, ModelFacts
from penstock.config.settings import Settings
from penstock.errors import CheckpointError, did_you_mean, shown
from penstock.kernels.ranks import Alone
from penstock.layers.attention import AttentionSpec
from penstock.layers.disentangled import DisentangledSpec
from penstock.layers.sizes import WeightSizes
from penstock.models.architectures import ARCHITECTURES, ENCODERS
from penstock.models.decoder import Decoder
from penstock.models.encoders import encoder_spec, module_files, read_encoder
from penstock.models.hf_config import HFConfig
from penstock.models.hf_keys import SIZES
from penstock.models.loading.hf_quantization import read_scheme
from penstock.models.loading.stored_head import has_own_head
from penstock.models.sizes import adapted_rows, head_sizes, idle_elements, model_sizes, stored_matrices
from penstock.models.spec import AudioEncoderSpec, AudioTowerSpec, MediaEncoderSpec, ModelSpec, MTPSpec
from penstock.quantization.scheme import SCALES_OF_OTHERS, GGUFScheme, with_prefixes
from penstock.system.start import Start

if TYPE_CHECKING:
    from penstock.api.request import MediaKind
    from penstock.checkpoint.gguf.file import GGUFFile
    from penstock.config.model_facts import TowerFacts
    from penstock.kernels.array_types import A
    from penstock.kernels.ops import Ops
    from penstock.models.audio_encoder import AudioEncoder
    from penstock.models.audio_tower import AudioTower
    from penstock.models.encoder import Encoder
    from penstock.models.loading.loader import WeightFile
    from penstock.models.loading.packed_loading import PackedLookup
    from penstock.models.mtp import MTPHead
    from penstock.models.tower import Tower
    from penstock.quantization.base import WeightFactory

ModelT = TypeVar("ModelT", Decoder, "Encoder")

logger = logging.getLogger(__name__)

KNOWN = "docs/models.md lists those that are supported"

_ALIASES = {"MPTForCausalLM": "MptForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Architecture names in older files, with their names in `transformers`."""


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Read the `ModelSpec` of a checkpoint.

    Raises:
        CheckpointError: the architecture is unknown, or the config has a setting that is not implemented.
    """
    return _read(checkpoint, HFConfig(checkpoint))


def _read(checkpoint: Checkpoint, config: HFConfig) -> ModelSpec:
    architectures = config.find("architectures", list) or []
    families = ARCHITECTURES | ENCODERS
    current = [_ALIASES.get(name, name) for name in architectures if isinstance(name, str)]
    known = next((name for name in families if name in current), None)
    if known is None:
        named = ", ".join(map(str, architectures[:4])) or "none"
        close = did_you_mean(named, [name for name in families if _family(name) == _family(named)])
        raise CheckpointError(
            f"{config.file} names the architecture {named}, which is unknown{close}; {KNOWN}{_other_way(current)}"
        )
    spec = families[known](config)
    config.refuse_noncausal(_sees_both_sides(spec, windows=known.startswith(_WINDOWS_TO_BOTH_SIDES)))
    about = read_encoder(checkpoint)
    gives_logits = about is None or about.task == "score"
    if gives_logits and spec.tie_embeddings and checkpoint.gguf is None and has_own_head(checkpoint.path, spec.names):
        spec = replace(spec, tie_embeddings=False)
    if about is not None:
        spec = encoder_spec(spec, config, about, checkpoint)
    elif any(isinstance(mixer, AttentionSpec) and mixer.bidirectional for mixer in spec.mixers):
        raise CheckpointError(f"{config.file}: a model with bidirectional attention can embed texts, but not generate")
    if checkpoint.gguf is not None:
        from penstock.models.loading.gguf_scheme import read_gguf_scheme  # here: a folder has no need of them
        from penstock.models.loading.gguf_spec import as_stored

        spec = as_stored(spec, checkpoint.gguf)
        sizes = model_sizes(spec)
        _check_elements(sizes, checkpoint, checkpoint.gguf)
        return replace(spec, quantization=read_gguf_scheme(checkpoint.gguf, stored_matrices(spec, sizes)))
    scheme = read_scheme(config)
    if scheme is not None:
        scheme = with_prefixes(scheme, spec.names.prefixes)
        spec = replace(spec, names=replace(spec.names, ignored=(*spec.names.ignored, SCALES_OF_OTHERS)))
    return replace(spec, quantization=scheme)


def _other_way(architectures: Sequence[str]) -> str:
    """Advice for an unknown architecture: the flag with which `transformers`, if installed, may compute it.

    Its list of decoders is read as text, as importing the package takes seconds.
    """
    package = find_spec("transformers")
    listed = None if package is None or package.origin is None else Path(package.origin).parent / _AUTO_MODELS
    if listed is None or not listed.is_file():
        return ""
    _, _, decoders = listed.read_text().partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    names = re.findall(r'"(\w+)"\)', decoders.partition("\n)")[0])
    if set(names).isdisjoint(architectures):
        return ""
    return "; backend transformers may run it, more slowly, by the class that transformers has for it"


_AUTO_MODELS = "models/auto/modeling_auto.py"

_WINDOWS_TO_BOTH_SIDES = ("Qwen", "ModernBert")
"""Architectures whose windows are made for attention to both sides, too: `transformers` has those one longer."""


def _sees_both_sides(spec: ModelSpec, *, windows: bool) -> bool:
    return all(
        isinstance(mixer, AttentionSpec) and mixer.bidirectional and (windows or mixer.window is None)
        for mixer in spec.mixers
    )


def _family(architecture: str) -> str:
    """The family's name in an architecture's: another digit in it is another family, not a typing error."""
    return re.split("For|Model", architecture)[0].lower()


def _check_files(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Check that the weight files can hold the model of the config, before anything of its size is allocated."""
    if checkpoint.gguf is not None:
        return  # `_check_elements` checks the tensors in its header
    stored = sum(file.stat().st_size for file in weight_files(checkpoint.path))
    sizes = model_sizes(spec)
    needed = sum(matrix.rows * matrix.columns * matrix.format.bits // 8 for matrix in stored_matrices(spec, sizes))
    needed += 2 * (sizes.num_other_parameters - sizes.num_repeated)
    if needed > stored:
        raise CheckpointError(
            f"{checkpoint.config_file} describes a model of {sizes.num_parameters} parameters, at least "
            f"{needed} bytes, but the weight files have {stored}: they are incomplete, or one of these sizes is wrong: "
            f"{_sizes(checkpoint)}"
        )


def _check_elements(sizes: WeightSizes, checkpoint: Checkpoint, gguf: "GGUFFile") -> None:
    from penstock.models.loading.gguf_spec import xielu_size  # here: a folder has no need of it

    stored = sum(info.size for info in gguf.tensors.values()) + xielu_size(gguf)
    if sizes.num_parameters - sizes.num_repeated > stored:
        raise CheckpointError(
            f"{gguf.path} describes a model of {sizes.num_parameters} parameters, but its tensors have {stored} "
            f"elements: tensors are missing, or one of these sizes is wrong: {_sizes(checkpoint)}"
        )


def _sizes(checkpoint: Checkpoint) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in checkpoint.config.items() if key in SIZES)


def read_facts(checkpoint: Checkpoint, *, with_weights: bool = True, ranks: int = 1) -> ModelFacts:
    """Read the properties of a model that the engine's settings depend on.

    Args:
        with_weights: whether to check that the weights are complete; a simulation needs only the config.
        ranks: number of ranks that divide the model; the facts are those of one rank.

    Raises:
        ConfigError: the model cannot be divided among so many ranks.
        CheckpointError: as `read_spec`; also if weights are missing, or fewer than the config's sizes require.
    """
    spec = read_spec(checkpoint)
    if with_weights:
        _check_files(spec, checkpoint)
    facts = _facts(checkpoint.name, spec, ranks)
    return replace(
        facts,
        adapted_rows=adapted_rows(spec, ranks),
        is_encoder=spec.encoder is not None,
        towers=_tower_facts(checkpoint, spec),
        usual_length=checkpoint.recipe.num_ctx if checkpoint.recipe is not None else None,
    )


def _tower_facts(checkpoint: Checkpoint, spec: ModelSpec) -> "Mapping[MediaKind, TowerFacts]":
    if not spec.encoders:
        return {}
    from penstock.models.tower_facts import read_tower_facts  # here: few models have a tower

    return read_tower_facts(checkpoint, spec)


def _facts(name: str, spec: ModelSpec, ranks: int, head_of: ModelSpec | None = None) -> ModelFacts:
    """The facts of a model, or of the head of the model `head_of`."""
    layers = tuple(layer.facts for layer in spec.shard(ranks).layers)
    sizes = model_sizes(spec, ranks) if head_of is None else head_sizes(head_of, ranks)
    if ranks > 1:  # all-gathered results of other ranks need memory, too
        whole = (layer.facts.activation_sizes for layer in spec.layers)
        layers = tuple(
            replace(layer, activation_sizes=(*layer.activation_sizes, *full))
            for layer, full in zip(layers, whole, strict=True)
        )
    scheme, ends = spec.quantization, spec.encoder
    if ends is not None and ends.convolution is not None:
        first = replace(layers[0], activation_sizes=(*layers[0].activation_sizes, ends.convolution.activation_sizes))
        layers = (first, *layers[1:])
    return ModelFacts(
        name=name,
        dtype=spec.dtype,
        num_parameters=sizes.num_parameters,
        max_position=spec.max_position,
        limit=spec.limit,
        vocab_size=spec.vocab_size,
        hidden_size=max(spec.hidden_size, 0 if ends is None else ends.embedding_size),
        layers=layers,
        rotary_dim=sum(rope.dim for rope in spec.ropes),
        biased_heads=0 if spec.position_bias is None else spec.position_bias.num_heads,
        table_elements=sum(mixer.table_elements for mixer in spec.mixers if isinstance(mixer, DisentangledSpec)),
        matrices=stored_matrices(spec, sizes),
        idle_elements=idle_elements(spec, ranks) if head_of is None else 0,
        stored_format=scheme.format if scheme else None,
        halves_kv=isinstance(scheme, GGUFScheme),
    )


def read_mtp_facts(checkpoint: Checkpoint, *, ranks: int = 1) -> ModelFacts | None:
    """Like `read_facts`, for the multi-token prediction head; None if the model has none.

    Args:
        ranks: number of ranks that divide the model; the facts are those of one rank.

    Raises:
        ConfigError: the model cannot be divided among so many ranks.
        CheckpointError: as `read_spec`.
    """
    spec = read_spec(checkpoint)
    if spec.mtp is None:
        return None
    facts = _facts(f"the head of {checkpoint.name}", _mtp_model(checkpoint, spec, spec.mtp), ranks, head_of=spec)
    hidden, (layer,) = spec.hidden_size, facts.layers
    beginning = ActivationSizes(5 * hidden, 5 * hidden, 2 * hidden)  # both norms, and their concatenation
    return replace(facts, layers=(replace(layer, activation_sizes=(*layer.activation_sizes, beginning)),))


def _mtp_model(checkpoint: Checkpoint, target: ModelSpec, mtp: MTPSpec) -> ModelSpec:
    """The head's layer as a model; a GGUF file may store its matrices in other types than the model's."""
    head = mtp.as_model(target)
    if checkpoint.gguf is None:
        return head
    from penstock.models.loading.gguf_scheme import read_gguf_scheme

    matrices = stored_matrices(head, head_sizes(target))
    return replace(head, quantization=read_gguf_scheme(checkpoint.gguf, matrices))


def load_mtp(checkpoint: Checkpoint, settings: Settings, ops: "Ops[A]", target: "Decoder[A]") -> "MTPHead[A]":
    """Load the multi-token prediction head of `target`; `settings` are the head's own.

    Raises:
        CheckpointError: the weights are damaged, incomplete or in an unsupported format.
    """
    from penstock.models.loading.loader import load_weights
    from penstock.models.mtp import MTPHead

    mtp = target.spec.mtp
    assert mtp is not None, "read_mtp_facts returned its facts"
    spec = _mtp_model(checkpoint, target.spec, mtp)
    factory = _new_factory(spec, settings, ops)
    head = MTPHead(mtp, target, settings.max_model_len, factory)
    wanted = "|".join(map(re.escape, factory.parameters))
    files = open_weights(checkpoint, replace(spec, mtp=mtp), factory.parameters)
    load_weights(files, factory.parameters, re.compile(f"(?!({wanted})$).*"))
    return head


def load_model(checkpoint: Checkpoint, settings: Settings, ops: "Ops[A]", start: Start | None = None) -> "Decoder[A]":
    """Load a model with its weights, in the dtype and on the device of `settings`; it computes with `ops`.

    Args:
        start: what was prepared for loading the model.

    Raises:
        CheckpointError: the config or the weights are damaged, incomplete or in an unsupported format.
    """
    return _load(checkpoint, settings, ops, start or Start(), Decoder)


def load_encoder(checkpoint: Checkpoint, settings: Settings, ops: "Ops[A]", start: Start | None = None) -> "Encoder[A]":
    """Like `load_model`, for a model that embeds or scores."""
    from penstock.models.encoder import Encoder  # here: a decoder has no need of it

    return _load(checkpoint, settings, ops, start or Start(), Encoder)


def _load(
    checkpoint: Checkpoint,
    settings: Settings,
    ops: "Ops",
    start: Start,
    make: "Callable[[ModelSpec, int, WeightFactory], ModelT]",
) -> ModelT:
    from penstock.models.loading.packed_loading import load_through_cache

    given = HFConfig(checkpoint)
    spec = _read(checkpoint, given)
    given.warn_of_unread()  # here, because this runs once per model
    if (about := read_encoder(checkpoint)) is not None and about.unread:
        logger.warning("these settings are unknown and have no effect: %s", ", ".join(about.unread))
    if checkpoint.unheeded:
        file = checkpoint.path if checkpoint.gguf is not None else checkpoint.path / "generation_config.json"
        keys = ", ".join(checkpoint.unheeded)
        logger.warning("%s: these settings have no effect (docs/model-folders.md has the reasons): %s", file, keys)
    return load_through_cache(
        checkpoint, settings, ops, start, partial(_make_model, checkpoint, spec, settings, ops, make)
    )


def _make_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    settings: Settings,
    ops: "Ops",
    make: "Callable[[ModelSpec, int, WeightFactory], ModelT]",
    lookup: "PackedLookup",
) -> "tuple[ModelT, WeightFactory]":
    """Build the model; load and pack the weights that are not in the cache (`lookup`)."""
    from penstock.models.loading.loader import load_weights

    factory = _new_factory(spec, settings, ops, lookup=lookup, takes_adapters=settings.memory.adapters > 0)
    model = make(spec, settings.max_model_len, factory)
    if isinstance(model, Decoder):
        for kind in settings.towers:
            model.towers[kind] = _make_tower(checkpoint, spec.encoders[kind], settings, factory, lookup)
    if not factory.filled.issuperset(factory.parameters):
        files = open_weights(checkpoint, spec, factory.parameters)
        load_weights(files, factory.parameters, model.ignored_tensors(), factory.filled)
    return model, factory


def _make_tower(
    checkpoint: Checkpoint,
    spec: MediaEncoderSpec,
    settings: Settings,
    factory: "WeightFactory[A]",
    lookup: "PackedLookup",
) -> "Tower[A] | AudioTower[A] | AudioEncoder[A]":
    """Build an encoder of media, whole in each rank and unquantized; `factory` gets its parameters."""
    from penstock.checkpoint.image_input import read_image_input  # here: few models have a tower
    from penstock.models.audio_encoder import AudioEncoder
    from penstock.models.audio_tower import AudioTower
    from penstock.models.tower import Tower
    from penstock.quantization.base import Unquantized, WeightFactory

    ops = replace(factory.ops, collective=Alone())
    own = WeightFactory(Unquantized(), ops, ops.dtype(settings.dtype), settings.device, lookup)
    tower: Tower[A] | AudioTower[A] | AudioEncoder[A]
    if isinstance(spec, AudioTowerSpec):
        tower = AudioTower(spec, own)
    elif isinstance(spec, AudioEncoderSpec):
        tower = AudioEncoder(spec, own)
    else:
        tower = Tower(spec, read_image_input(checkpoint), own)
    factory.include(own)
    return tower


def _new_factory(spec: ModelSpec, settings: Settings, ops: "Ops[A]", **options: Any) -> "WeightFactory[A]":
    """A factory of the model's weights; see `WeightFactory` for the options."""
    from penstock.quantization.base import WeightFactory
    from penstock.quantization.methods import make_method

    return WeightFactory(
        make_method(settings.quantization, spec.quantization, ops),
        ops,
        ops.dtype(settings.dtype),
        settings.device,
        stored=ops.dtype("float16") if settings.float16_weights else None,
        **options,
    )


def open_weights(checkpoint: Checkpoint, spec: ModelSpec, parameters: Iterable[str]) -> "list[WeightFile]":
    """The weight files of a checkpoint, with tensors named like the model's parameters."""
    from penstock.models.loading.stacked_experts import unstacked  # imported lazily, like everything that needs torch
    from penstock.models.loading.transposed import TransposedFile

    if checkpoint.gguf is not None:
        from penstock.models.loading.gguf_weights import gguf_weight_files

        parameters = list(parameters)
        towers: list[WeightFile] = []
        if checkpoint.media is not None:
            from penstock.models.loading.mmproj_weights import mmproj_weights

            towers += mmproj_weights(checkpoint.media, spec, parameters)
            of_towers = {name for file in towers for name in file.shapes}
            parameters = [name for name in parameters if name not in of_towers]
        return [*unstacked(gguf_weight_files(checkpoint.gguf, spec, parameters), spec), *towers]
    from penstock.models.loading.safetensors_weights import SafetensorsFile

    files: list[WeightFile] = [SafetensorsFile(file, spec.names.prefixes) for file in weight_files(checkpoint.path)]
    if spec.names.transposed is not None:
        files = [TransposedFile(file, spec.names.transposed) for file in files]
    files += [SafetensorsFile(file, prefixes) for file, prefixes in module_files(checkpoint, spec)]
    return unstacked(files, spec)
