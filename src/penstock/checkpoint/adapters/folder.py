"""An adapter's files, checked against a model: PEFT's config and weights in a folder, or one GGUF file."""

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal, get_args

from penstock.api.request import Adapter
from penstock.checkpoint.adapters.adaptable import Adaptable, AdaptableExperts, AdaptedMap, ExpertsPart
from penstock.checkpoint.adapters.gguf import GGUFAdapter, read_gguf_adapter
from penstock.checkpoint.adapters.peft import CONFIG_FILE, LARGEST_SCALE, PeftConfig
from penstock.checkpoint.adapters.weights import WEIGHTS_FILE, check_finite, read_adapter_header
from penstock.checkpoint.gguf.file import choose_gguf, is_gguf
from penstock.checkpoint.hub_cache import cached_folder, hub_answers
from penstock.checkpoint.safetensors import MappedTensors, read_header
from penstock.dataclass import dataclass
from penstock.errors import AdapterError, ConfigError, shown

_HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<choice>[\w.+/-]+))?")
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<linear>[AB])\.weight|(?P<embedding>embedding_[AB])|(?P<magnitude>magnitude_vector))"
)
_COPY = re.compile(r"(.+)\.base_layer\.weight")
"""A copy of the base model's weight, which PEFT saves with an adapter of its embedding."""
_EXPERTS_PARTS = get_args(ExpertsPart)
_NAME = re.compile(r"[^\s,=/][^\s,=]{0,199}")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was checked against the model."""

    adapter: Adapter
    maps: tuple[AdaptedMap, ...]
    copies: tuple[tuple[str, str], ...] = ()
    """(name in the file, name in the model) of copies of the base model's weights."""
    gguf: GGUFAdapter | None = None
    """None: it has PEFT's files."""

    def weights(self) -> MappedTensors | GGUFAdapter:
        """The weights, which can be read by name.

        Raises:
            CheckpointError: the file is damaged.
        """
        if self.gguf is not None:
            return self.gguf
        file = Path(self.adapter.path, WEIGHTS_FILE)
        return MappedTensors(file, read_header(file))


def adapter_path(path: str) -> Path:
    """The folder or GGUF file of an adapter: a local one, or the download of a hub id.

    Raises:
        AdapterError: it is neither, or cannot be downloaded.
    """
    folder = Path(os.path.expanduser(path))
    if folder.is_dir() or is_gguf(folder):
        return folder.resolve()
    found = _HUB_ID.fullmatch(path)
    if folder.exists() or found is None:
        raise AdapterError(
            f"there is no folder {path}, nor such a GGUF file: give a folder that contains {CONFIG_FILE}, a GGUF file "
            "or a hub id"
        )
    try:
        if not hub_answers() and (cached := cached_folder(found["repository"], None)) is not None:
            return _in_cache(cached, found["choice"])
        return _downloaded(found["repository"], found["choice"])
    except ConfigError:
        raise
    except Exception as error:  # network, authentication, disk, a bad id: each has its own type
        raise AdapterError(
            f"{path} is not a local folder, and could not be downloaded from the Hugging Face hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def _downloaded(repository: str, choice: str | None) -> Path:
    """The folder of PEFT's files of a hub repository, or its GGUF file.

    Args:
        choice: of a GGUF file, as `choose_gguf` takes it; None: PEFT's files, or else the only GGUF file.
    """
    from huggingface_hub import HfApi, snapshot_download  # imported when used: it takes a quarter of a second

    if choice is None:
        folder = Path(snapshot_download(repository, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
        if (folder / CONFIG_FILE).exists():
            return folder
    names = [name for name in HfApi().list_repo_files(repository) if name.endswith(".gguf")]
    if not names and choice is None:
        return folder  # where the missing config is reported
    name = choose_gguf(names, choice, f"the hub repository {repository}")
    return Path(snapshot_download(repository, allow_patterns=[name])) / name


def _in_cache(folder: Path, choice: str | None) -> Path:
    """What `_downloaded` returns, of a hub repository in the cache."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    if choice is None and ((folder / CONFIG_FILE).exists() or not names):
        return folder
    return folder / choose_gguf(names, choice, str(folder))


def check_name(name: str) -> None:
    """
    Raises:
        AdapterError: the name contains characters with which requests could not select the adapter.
    """
    if _NAME.fullmatch(name) is None:
        raise AdapterError(f"an adapter's name must not contain spaces, commas or equals signs, as {shown(name)} does")


def read_adapter(name: str, path: str, model: Adaptable) -> AdapterFiles:
    """Check an adapter's files.

    Raises:
        AdapterError: it is incomplete, damaged, does not match the model or requires an unsupported feature; the
            message names the adapter.
    """
    check_name(name)
    try:
        folder = adapter_path(path)
        if (found := _gguf_in(folder)) is not None:
            gguf = read_gguf_adapter(found, model)
            adapter = Adapter(name, str(folder), _digest(found), gguf.num_elements)
            return AdapterFiles(adapter, gguf.maps, gguf=gguf)
        config = PeftConfig.read(folder)
        file = folder / WEIGHTS_FILE
        if not file.is_file():
            raise AdapterError(f"{folder} has no {WEIGHTS_FILE}; other formats are not supported")
        tensors = read_adapter_header(file)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        copies = {name: matrix for name in shapes if (matrix := _copied(name, shapes[name], model)) is not None}
        own = {name: shape for name, shape in shapes.items() if name not in copies}
        maps = _maps(config, own, model)
        check_finite(file, tensors, model.dtype)
        elements = sum(math.prod(shape) for shape in own.values())
        return AdapterFiles(
            Adapter(name, str(folder), _digest(folder / CONFIG_FILE, file), elements), maps, tuple(copies.items())
        )
    except ConfigError as error:
        raise AdapterError(f"the adapter {name!r} cannot be used: {error}") from None
    except OSError as error:
        raise AdapterError(f"the adapter {name!r} cannot be read: {error}") from None


def _gguf_in(path: Path) -> Path | None:
    """The adapter's GGUF file: `path`, or the only one of a folder without PEFT's config; None: there is none."""
    if path.is_file():
        return path
    found = [] if (path / CONFIG_FILE).exists() else sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise AdapterError(f"{path} has {len(found)} GGUF files: give one of them")
    return found[0] if found else None


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(2**20):
                digest.update(part)
    return digest.hexdigest()[:32]


def _copied(name: str, shape: tuple[int, ...], model: Adaptable) -> str | None:
    """The weight of the model that a tensor of the file is a copy of; None: it is an adapter's own."""
    copy = _COPY.fullmatch(name)
    if copy is None:
        return None
    matrix = model.name_of(copy[1].removeprefix(_PREFIX))
    return matrix if shape in (model.embeddings.get(matrix), model.shape_of(matrix)) else None


def _maps(config: PeftConfig, shapes: Mapping[str, tuple[int, ...]], model: Adaptable) -> tuple[AdaptedMap, ...]:
    """The adapter's term for each linear map.

    Raises:
        AdapterError: the file lacks a tensor that the config requires, or has others.
    """
    found: dict[tuple[str, str], AdaptedMap] = {}
    fitting = {module: _fits(module, kinds, shapes, config, model) for module, kinds in _modules(shapes).items()}
    layouts = {fits[0].swapped for fits in fitting.values() if fits[0].part in _EXPERTS_PARTS and len(fits) == 1}
    for module, fits in fitting.items():
        adapted = fits[0] if len(fits) == 1 else _of_layout(module, fits, layouts)
        other = found.setdefault((adapted.matrix, adapted.part), adapted)
        if other is not adapted:
            raise AdapterError(f"it has {other.module} and {adapted.module}, which are the same linear map")
        if not abs(adapted.scale) <= LARGEST_SCALE:
            raise AdapterError(f"the scale of {module} is {adapted.scale:g}: lora_alpha of {CONFIG_FILE} is too large")
    if not found:
        raise AdapterError("it has no weights")
    _check_complete(found, config, model)
    return tuple(found.values())


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, set[str]]:
    """The modules that the file has weights of, each with the kinds of its weights."""
    found: dict[str, set[str]] = {}
    for name in sorted(shapes):
        tensor = _TENSOR.fullmatch(name)
        if tensor is None:
            raise AdapterError(f"it has {name}, which is not a LoRA weight of a linear map")
        found.setdefault(tensor["module"], set()).add(str(tensor.lastgroup))
    return found


def _fits(
    stem: str, kinds: set[str], shapes: Mapping[str, tuple[int, ...]], config: PeftConfig, model: Adaptable
) -> list[AdaptedMap]:
    """The terms that `stem`, a linear map of the file, adapts: one, or all experts that its shapes fit."""
    module = stem.removeprefix(_PREFIX)
    matrix = model.name_of(module)
    shape = model.embeddings.get(matrix) if "embedding" in kinds else model.shape_of(matrix)
    experts = model.experts_of(model.name_of(module.replace(".base_layer", "")))
    if shape is None and experts is not None and kinds == {"linear"}:
        return _of_experts(stem, experts, shapes, config, model)
    if shape is None or {"embedding", "linear"} <= kinds:
        raise AdapterError(f"it adds to {module}, which {_why_not(matrix, model)}")
    rank = config.rank_of(module)
    part: Literal["linear", "embedding"] = "embedding" if "embedding" in kinds else "linear"
    made = AdaptedMap(matrix, stem, rank, config.scale_of(module), part, has_magnitude="magnitude" in kinds)
    rows, columns = reversed(shape) if part == "embedding" else shape
    for name, wanted in zip(made.stored_names, ((rank, columns), (rows, rank)), strict=True):
        _check_shape(name, wanted, shapes, made)
    if config.dora or made.has_magnitude:
        _check_magnitude(made, rows, shapes, config, model)
    if config.ties and (part == "embedding" or "." not in matrix):  # a matrix outside of layers: the output projection
        raise AdapterError(f"{CONFIG_FILE} has ensure_weight_tying: True with {module}, which is not supported")
    return [made]


def _check_shape(name: str, wanted: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], made: AdaptedMap) -> None:
    if name not in shapes:
        (other,) = {*made.stored_names} - {name}
        raise AdapterError(f"it has {other}, but no {name}")
    if shapes[name] != wanted:
        raise AdapterError(
            f"{name} has the shape {list(shapes[name])}; the model, and the rank {made.rank} of {CONFIG_FILE}, ask "
            f"for {list(wanted)}"
        )


def _check_magnitude(
    made: AdaptedMap, rows: int, shapes: Mapping[str, tuple[int, ...]], config: PeftConfig, model: Adaptable
) -> None:
    name = made.magnitude_name
    if not config.dora:
        raise AdapterError(f"it has {name}, though use_dora of {CONFIG_FILE} is false")
    if made.part == "embedding" or made.matrix in model.by_head:
        raise AdapterError(f"{CONFIG_FILE} has use_dora: True, which is not supported for {made.matrix}")
    if shapes.get(name) != (rows,):
        raise AdapterError(f"with use_dora it needs {name} of the shape [{rows}]")


def _of_experts(
    stem: str, prefix: str, shapes: Mapping[str, tuple[int, ...]], config: PeftConfig, model: Adaptable
) -> list[AdaptedMap]:
    """The terms for a parameter of all experts together (`target_parameters`) that have these shapes."""
    experts, module = model.experts[prefix], stem.removeprefix(_PREFIX).replace(".base_layer", "")
    if config.dora:
        raise AdapterError(f"{CONFIG_FILE} has use_dora: True, which is not supported for the experts {module}")
    parameters = _parameters(experts)
    named = [
        (part, name)
        for part, name in parameters
        if config.has_parameter(f"{module}.{name}") or config.has_parameter(f"{prefix}.{name}")
    ]
    fits, tried = [], []
    for part, name in named or parameters:
        rank, scale = config.rank_of(f"{module}.{name}"), config.scale_of(f"{module}.{name}")
        for swapped in (False, True):
            rows, columns = reversed(experts.shape_of(part)) if swapped else experts.shape_of(part)
            made = AdaptedMap(prefix, stem, rank, scale, part, swapped)
            wanted = (rank * experts.count, columns), (rows, rank * experts.count)
            if tuple(shapes.get(name) for name in made.stored_names) == wanted:
                fits.append(made)
            tried.append(f"{list(wanted[0])} and {list(wanted[1])}")
    if not fits:
        raise AdapterError(
            f"{stem} has a lora_A and a lora_B whose shapes are of none of the experts' maps; those are "
            f"{', '.join(tried)}"
        )
    return fits


def _of_layout(stem: str, fits: Sequence[AdaptedMap], layouts: AbstractSet[bool]) -> AdaptedMap:
    """The one of several terms of experts that has the file's layout.

    Args:
        layouts: those of the file's parameters whose shapes fit one layout of one parameter.
    """
    if not layouts and len({fit.part for fit in fits}) == len(fits):
        layouts = {False}  # `down`, and `up` swapped: the layout of the newer versions of PEFT
    found = [fit for fit in fits if fit.swapped in layouts]
    if len(found) != 1:
        raise AdapterError(
            f"{stem} is ambiguous: its shapes are those of {' and of '.join(_described(fit) for fit in fits)}, and no "
            "other parameter of the file tells which"
        )
    return found[0]


def _described(fit: AdaptedMap) -> str:
    return f"{fit.part} " + ("transposed, as earlier versions of PEFT saved it" if fit.swapped else "as it is")


def _parameters(experts: AdaptableExperts) -> tuple[tuple[ExpertsPart, str], ...]:
    """The parameters that `transformers` has of all experts together."""
    return ("gate_up", "gate_up_proj" if len(experts.maps) > 2 else "up_proj"), ("down", "down_proj")


def _check_complete(found: Mapping[tuple[str, str], AdaptedMap], config: PeftConfig, model: Adaptable) -> None:
    """
    Raises:
        AdapterError: there are no weights for a map that the config lists.
    """
    last_names = {matrix.rpartition(".")[2] for matrix, _ in found}
    for matrix in model.matrices:
        # what "all-linear" stands for depends on how a release of transformers writes the model
        is_listed = config.has(matrix) and (config.targets != "all-linear" or matrix.rpartition(".")[2] in last_names)
        if is_listed and (matrix, "linear") not in found:
            raise AdapterError(f"target_modules names {matrix}, for which the file has no weights")
    for embedding in model.embeddings:
        if config.targets != "all-linear" and config.has(embedding) and (embedding, "embedding") not in found:
            raise AdapterError(f"target_modules names {embedding}, for which the file has no weights")
    for prefix, experts in model.experts.items():
        for part, name in _parameters(experts):
            if config.has_parameter(f"{prefix}.{name}") and (prefix, part) not in found:
                raise AdapterError(f"target_parameters names {prefix}.{name}, for which the file has no weights")
    for matrix in _expert_maps(found, model):
        if config.has(matrix) and (matrix, "linear") not in found:
            raise AdapterError(f"target_modules names {matrix}, for which the file has no weights")


def _expert_maps(found: Mapping[tuple[str, str], AdaptedMap], model: Adaptable) -> Iterator[str]:
    """The maps of all experts, if the file has some of single experts."""
    of_single = {matrix.rsplit(".", 2)[0] for matrix, part in found if part == "linear"} & model.experts.keys()
    for prefix, experts in model.experts.items() if of_single else ():
        for number in range(experts.count):
            yield from (f"{prefix}.{number}.{name}" for name in experts.maps)


def _why_not(matrix: str, model: Adaptable) -> str:
    names = [*model.matrices, *model.embeddings, *(name for experts in model.experts.values() for name in experts.maps)]
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    listed = ", ".join(kinds)
    if matrix.rpartition(".")[2] in kinds:
        return f"this model does not have, or not as a linear map that adapters may add to ({listed} of its layers)"
    return (
        f"adapters cannot add to here; they can to {listed} of the layers" if kinds else "adapters cannot add to here"
    )
