"""Finds a checkpoint on disk or on the hub, and reads its configs. No torch, no weights.

    model (folder, .gguf file, hub id or None) ──resolve_path──> folder or GGUF file ──open_model──> Checkpoint
                                                                 folder ──weight_files──> its safetensors files

A folder holds config.json and safetensors files; a GGUF file holds all in one, and its metadata is converted to the
same config. None is the demo model, which is part of the package. Files are untrusted: their sizes are checked against
limits before they are read, and the paths in them must stay within the folder.
"""

import functools
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.created import Recipe, created_files, find_created, recipe_of
from penstock.checkpoint.generation_config import GenerationDefaults, read_defaults
from penstock.checkpoint.generation_config import unheeded as unheeded_settings
from penstock.checkpoint.gguf.file import GGUFFile, choose_gguf, is_gguf, model_name, open_gguf, parts_of
from penstock.checkpoint.hub_cache import cached_folder, hub_answers
from penstock.config.engine_config import ModelConfig, parse_overrides
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, ConfigError, shown

if TYPE_CHECKING:
    from penstock.checkpoint.gguf.mmproj import MediaFile

T = TypeVar("T")

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
DEMO_NAME = "penstock-demo"

_MAX_JSON_BYTES = 8 * 2**20
"""Maximum bytes of config.json and similar files; the largest in use have 1 MB. Parsing takes up to 25 times that."""
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_TEXT_BYTES = 2**20

HUB_ID = re.compile(r"(?P<repository>[\w][\w.-]*(/[\w][\w.-]*)?)(:(?P<choice>[\w][\w./-]*))?")
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./+-]*")
HUB_FILES = [
    *("*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model"),
    *("*.tiktoken", "tiktoken.model"),
]
HUB_SECONDS = 10.0
"""Maximum time to wait for the hub's list of a repository's files."""
HUB_COPIES = ["original/*", "consolidated*", "*.fp16*.safetensors"]
"""Hub files that repeat a model's weights in another format."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its path and its configs."""

    path: Path
    """The folder, or the GGUF file (of a split model, the first)."""
    name: str
    """The hub id, or the name of the given folder, file or link."""
    config: dict[str, Any]
    """The content of `config.json` with `hf_overrides`, or its equivalent for a GGUF file."""
    config_file: Path
    """Path of the config, for errors."""
    generation: GenerationDefaults
    gguf: GGUFFile | None = None
    """The headers of a GGUF file."""
    media: "MediaFile | None" = None
    """The mmproj file of a GGUF model, whose config is then that of both."""
    task: Literal["generate", "embed", "score"] | None = None
    """The requested task; None: the model's own."""
    hf_overrides: str | None = None
    """JSON object that replaces settings of `config.json`."""
    unheeded: tuple[str, ...] = ()
    """Keys of `generation_config.json` or a GGUF file that change the answers of `transformers` or llama.cpp, but not
    Penstock's."""
    recipe: Recipe | None = None
    """The settings of a created model; its parameters are part of `generation`."""

    @property
    def files(self) -> dict[str, Path]:
        """The model's files by name, with an mmproj file beside it; of a created model those that it was made from."""
        if self.recipe is not None:
            return created_files(self.path if self.gguf is None else self.path.parent)
        if self.gguf is None:
            files = list(self.path.iterdir())
        else:
            files = [*self.gguf.files, *([] if self.media is None else [self.media.file.path])]
        return {file.name: file.absolute() for file in files}

    @property
    def mmproj(self) -> str | None:
        """Path of the mmproj file that the user named; None: there is none, or it is beside the model."""
        return None if self.media is None or self.media.is_beside else str(self.media.file.path)


def open_model(config: ModelConfig) -> Checkpoint:
    """Find the model that the options name, and read its configs. Raises the same errors as `open_checkpoint`."""
    return open_checkpoint(config.model, config.task, config.revision, config.hf_overrides, config.mmproj)


def open_checkpoint(
    model: str | None,
    task: str = "auto",
    revision: str | None = None,
    hf_overrides: str | None = None,
    mmproj: str | None = None,
) -> Checkpoint:
    """Find a model and read its configs.

    Args:
        task: generate, embed, score, or auto: the checkpoint's own.
        revision: branch, tag or commit of a hub repository.
        hf_overrides: a JSON object that replaces settings of config.json.
        mmproj: the mmproj file of a GGUF model; None: the one beside it, if there is one.

    Raises:
        CheckpointError: there is no such folder or file and no such model on the hub, or it is incomplete or damaged.
        ConfigError: the revision or the overrides cannot apply to this kind of model.
    """
    path = resolve_path(model, revision)
    name = _name(model, path)
    wanted = cast('Literal["generate", "embed", "score"] | None', None if task == "auto" else task)
    overrides, recipe = parse_overrides(hf_overrides), recipe_of(path)
    if path.is_file():
        if overrides:
            raise ConfigError(
                f"hf_overrides replace settings of config.json, and {path.name}, a GGUF file, has none: leave them out"
            )
        return _open_gguf(path, name, wanted, mmproj, recipe)
    if mmproj is not None:
        raise ConfigError(
            f"mmproj is the vision tower or audio encoder of a GGUF model, and {name} is none: leave it out"
        )
    config_file, generation_file = path / "config.json", path / "generation_config.json"
    config = read_json(config_file)
    if config is None:
        raise CheckpointError(f"{path} has no config.json, so it is not a Hugging Face model folder")
    config = _overridden(config, overrides)
    generation = read_json(generation_file) or {}
    changed = recipe.generation(generation) if recipe else generation
    return Checkpoint(
        path,
        name,
        config,
        config_file,
        read_defaults(changed, config, generation_file, config_file),
        task=wanted,
        hf_overrides=hf_overrides,
        unheeded=unheeded_settings(generation, transcribes=config.get("model_type") == "whisper"),
        recipe=recipe,
    )


def _open_gguf(
    path: Path,
    name: str,
    task: Literal["generate", "embed", "score"] | None,
    mmproj: str | None,
    recipe: Recipe | None,
) -> Checkpoint:
    # here: a folder has no need of them
    from penstock.checkpoint.gguf.config import generation_config, model_config, pooling_of, unheeded_keys
    from penstock.checkpoint.gguf.mmproj import read_beside, read_mmproj

    gguf = open_gguf(path)
    generation = generation_config(gguf)
    defaults = read_defaults(recipe.generation(generation) if recipe else generation, {}, path, path)
    config, media = model_config(gguf), None
    if mmproj is not None:
        media = read_mmproj(Path(os.path.expanduser(mmproj)), config, gguf.metadata)
    elif pooling_of(gguf) is None:
        media = read_beside(path, config, gguf.metadata)
    if media is not None:
        config = media.config
    return Checkpoint(
        path, name, config, path, defaults, gguf, media, task, unheeded=unheeded_keys(gguf), recipe=recipe
    )


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings into the config as vLLM does: a nested config, such as `text_config`, is merged at every level,
    and any other value is replaced as a whole.
    """
    merged = dict(config)
    for key, value in overrides.items():
        is_config = key.endswith("_config") and key != "quantization_config"
        old = merged.get(key)
        is_merged = is_config and isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(cast(dict[str, Any], old), value) if is_merged else value
    return merged


def _merged(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merged(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in new.items()
    }
    return old | nested


def describe(checkpoint: Checkpoint) -> str:
    """The model's name, family, format and size in one line."""
    config = checkpoint.config
    if checkpoint.gguf is None:
        files = weight_files(checkpoint.path)
        quantization = config.get("quantization_config")
        stored = quantization.get("quant_method") if isinstance(quantization, dict) else None
        form = f"safetensors {stored or config.get('dtype') or config.get('torch_dtype') or ''}".rstrip()
    else:
        files, form = list(checkpoint.gguf.files), "GGUF"
    families = config.get("architectures")
    family = families[0] if isinstance(families, list) and families else "unknown architecture"
    size = sum(file.stat().st_size for file in files)
    line = f"{checkpoint.name}: {family}, {form}, {size / 2**20:,.0f} MiB"
    return line if line.isprintable() else shown(line)


def resolve_path(model: str | None, revision: str | None = None) -> Path:
    """The folder or GGUF file of a model: a local path, or else an alias, a created model, or a download from the hub;
    None: the demo model.

    Args:
        revision: branch, tag or commit of a hub repository; None: its main branch.

    Raises:
        CheckpointError: there is no such path and it cannot be downloaded, or there are several GGUF files.
        ConfigError: a revision is given, but the model is not from the hub.
    """
    return _resolve(model, revision, _download)


def download_model(hub_id: str) -> Path:
    """`resolve_path` of a hub id alone, whatever paths there are.

    Raises:
        CheckpointError: it is none, or it cannot be downloaded.
    """
    found = HUB_ID.fullmatch(hub_id)
    if found is None:
        raise CheckpointError(f"{shown(hub_id)} is no model of the hub: they are ORG/REPO, or ORG/REPO:Q4_K_M")
    return _download(found["repository"], found["choice"], None)


def find_on_disk(model: str | None, revision: str | None = None) -> Path | None:
    """`resolve_path` without the network: None if a hub model is not in the cache.

    Raises:
        CheckpointError, ConfigError: as `resolve_path`.
    """
    return _resolve(model, revision, _find_in_cache)


def _resolve(
    model: str | None, revision: str | None, find_hub_model: Callable[[str, str | None, str | None], T]
) -> Path | T:
    if model is not None and not os.path.exists(os.path.expanduser(model)):
        model = read_aliases().get(model, model)
        if (created := find_created(model)) is not None:
            return _in_folder(created)
    path = DEMO_FOLDER if model is None else Path(os.path.expanduser(model))  # Path's own raises without such a home
    if revision is not None and path.exists():
        raise ConfigError(
            f"revision is for models of the Hugging Face hub, and {model or 'the demo model'} is on this machine: "
            "leave it out"
        )
    if model is None:
        return path
    if path.is_dir():
        return _in_folder(path.resolve())
    if path.exists():
        if not is_gguf(path):
            raise CheckpointError(
                f"{model} is not a GGUF file; give one, or the folder with config.json and the weights"
            )
        return path.parent.resolve() / path.name  # a link may lead to a meaningless name
    hub_id = HUB_ID.fullmatch(model)
    if hub_id is None:
        raise CheckpointError(f"there is no folder or file {model}")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ConfigError(f"revision must be a branch, tag or commit of {model}, not {shown(revision)}")
    return find_hub_model(hub_id["repository"], hub_id["choice"], revision)


def _in_folder(folder: Path) -> Path:
    """The folder itself or, if it has no safetensors files, its GGUF file."""
    if _has_safetensors(folder):
        return folder
    names = [file.name for file in folder.glob("*.gguf") if file.is_file()]
    return folder / choose_gguf(names, None, f"the folder {folder}") if names else folder


def _has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_WEIGHTS, _INDEX))


_downloading = threading.Lock()
"""Held while downloading: tokenizer and weights are loaded by concurrent threads, but downloaded once."""


def _download(repository: str, choice: str | None, revision: str | None) -> Path:
    """Download a hub model: its folder, or the GGUF file selected by `choice`. Cached for the process's lifetime."""
    with _downloading:
        return _download_once(repository, choice, revision)


@functools.cache
def _download_once(repository: str, choice: str | None, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # imported when used: it takes a quarter of a second

    from penstock.checkpoint.gguf.mmproj import wanted_files

    download = functools.partial(snapshot_download, repository, revision=revision)
    where = f"the hub repository {repository}" + (f" at {revision}" if revision else "")
    try:
        if not hub_answers():
            return _find_cached(repository, choice, revision, where)
        if choice is None:
            folder = Path(download(allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES))
            if _has_safetensors(folder):
                return folder
        try:
            names = _hub_gguf_names(repository, revision)
        except Exception:  # as `snapshot_download` does where the hub fails
            if cached_folder(repository, revision) is None:
                raise
            return _find_cached(repository, choice, revision, where)
        if choice is None and not names:
            return folder
        chosen = choose_gguf(names, choice, where)
        return Path(download(allow_patterns=wanted_files(names, chosen))) / chosen
    except CheckpointError:
        raise
    except Exception as error:  # network, authentication, disk, a bad id: each has its own type, all end here
        raise CheckpointError(
            f"{repository} is not a local folder or file, and{f' its revision {revision}' if revision else ''} could "
            f"not be downloaded from the Hugging Face hub: {type(error).__name__}: {error}"
        ) from error


def _find_cached(repository: str, choice: str | None, revision: str | None, where: str) -> Path:
    """The folder or GGUF file of a hub model in the cache, without the hub."""
    folder = cached_folder(repository, revision)
    if folder is None:
        raise ConnectionError("the hub cannot be reached, and the model is not in its cache")
    found = _in_cached_folder(folder, choice, where)
    logger.warning("offline: using the cached %s %s", "file" if found.is_file() else "folder", found)
    return found


def _in_cached_folder(folder: Path, choice: str | None, where: str) -> Path:
    if choice is None and _has_safetensors(folder):
        return folder
    return folder / choose_gguf([str(file.relative_to(folder)) for file in folder.rglob("*.gguf")], choice, where)


def _find_in_cache(repository: str, choice: str | None, revision: str | None) -> Path | None:
    """The folder or GGUF file of a hub model in the cache; None: it is not there."""
    folder = cached_folder(repository, revision)
    try:
        return None if folder is None else _in_cached_folder(folder, choice, f"the hub repository {repository}")
    except CheckpointError:  # other files of the repository are there
        return None


def _hub_gguf_names(repository: str, revision: str | None) -> list[str]:
    """The GGUF files of a hub repository."""
    from huggingface_hub import HfApi

    # Not by `list_repo_files`, which tries for half a minute.
    files = HfApi().model_info(repository, revision=revision, timeout=HUB_SECONDS).siblings or ()
    return [file.rfilename for file in files if file.rfilename.endswith(".gguf")]


def _name(model: str | None, path: Path) -> str:
    if model is None:
        return DEMO_NAME
    given = os.path.expanduser(model)
    if os.path.isdir(given):
        return os.path.basename(os.path.abspath(given))  # a link's own name, as in `current -> v12`
    return model_name(path) if os.path.exists(given) else model


def weights_size(path: Path) -> int:
    """Bytes of the weight files of the model in a folder or GGUF file.

    Raises:
        CheckpointError: the folder has none.
        OSError: one is missing.
    """
    if path.is_dir():
        files = weight_files(path)
    else:
        files = [path.parent / name for name in parts_of(os.listdir(path.parent), path.name)]
    return sum(file.stat().st_size for file in files)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: `model.safetensors`, or those that the index names.

    Raises:
        CheckpointError: there are none, the index is damaged, or it names a file that is missing or outside of the
            folder. (A file may be a link to outside, as in the hub's cache.)
    """
    single, index = folder / _WEIGHTS, folder / _INDEX
    if single.is_file():
        return [single]
    content = read_json(index, _MAX_INDEX_BYTES)
    if content is None:
        raise CheckpointError(
            f"{folder} has neither {single.name} nor {index.name}; other formats of weights are not supported"
        )
    weight_map = content.get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{index} cannot be read as an index of weights: weight_map must name a file a tensor")
    return [_named_file(index, name) for name in sorted(set(names))]


def _named_file(index: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise CheckpointError(f"{index} names {shown(name)}: the weights must be files within the folder")
    try:
        found = (index.parent / name).is_file()
    except OSError:
        found = False
    if not found:
        raise CheckpointError(f"{index.name} names {shown(name)}, which is not in {index.parent}")
    return index.parent / name


def read_json(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file.

    Raises:
        CheckpointError: it cannot be read, is too large, or is not a JSON object.
    """
    text = read_text(path, max_bytes)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_text(path: Path, max_bytes: int = _MAX_TEXT_BYTES) -> str | None:
    """The text of a file, or None if there is no such file. Raises the same errors as `read_json`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe may never end
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes} bytes, the most that is read of such a file")
        return content.decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
