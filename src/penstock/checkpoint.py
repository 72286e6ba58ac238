"""A checkpoint on disk: where it lies, and what its small JSON files say. No torch, no weights.

    model (folder, hub id or None) ──resolve_path──> folder ──open_checkpoint──> Checkpoint
                                                            └──weight_files──> its safetensors files

None stands for the demo model, which is part of the package. The files are taken for hostile or damaged: their sizes
are bounded before they are read, and what they name stays within the folder.
"""

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import CheckpointError

DEMO_FOLDER = Path(__file__).parent / "demo"
DEMO_NAME = "penstock-demo"

_MAX_JSON_BYTES = 8 * 2**20
"""Of config.json and files like it: the largest in use have 1 MB. Reading one takes up to 25 times as much memory."""
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_TEXT_BYTES = 2**20
_MAX_TOKEN_ID = 2**31 - 1
_LONGEST_SHOWN = 200

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the checkpoint's `generation_config.json` decides where a request does not; None: it says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text; where `generation_config.json` names none, those of `config.json`."""
    temperature: float | None = None
    """0.0 if the file says `do_sample: false`."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder whose `config.json` could be read."""

    path: Path
    name: str
    """The hub id as given, else the folder's own name."""
    config: dict[str, Any]
    """`config.json`, as it is."""
    generation: GenerationDefaults


def open_checkpoint(model: str | None) -> Checkpoint:
    """Find a model and read its JSON files.

    Raises:
        CheckpointError: there is no such folder and no such model on the hub, or a JSON file is missing or damaged.
    """
    path = resolve_path(model)
    config = read_json(path / "config.json")
    if config is None:
        raise CheckpointError(f"{path} holds no config.json: not a Hugging Face model folder")
    generation = read_json(path / "generation_config.json") or {}
    return Checkpoint(path, _name(model, path), config, _generation_defaults(generation, config, path))


def resolve_path(model: str | None) -> Path:
    """The folder of a model: the demo model's for None, the folder itself, else a download from the hub.

    Raises:
        CheckpointError: it is neither a folder nor a model that can be downloaded.
    """
    if model is None:
        return DEMO_FOLDER
    path = Path(os.path.expanduser(model))  # the method of Path raises where there is no such home
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CheckpointError(f"{model} is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"there is no folder {model}")
    return _download(model)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # imported when used: it takes a quarter of a second

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, authentication, disk, a bad id: each has its own type, all end here
        raise CheckpointError(
            f"{hub_id} is no folder here and could not be downloaded from the Hugging Face hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def _name(model: str | None, path: Path) -> str:
    if model is None:
        return DEMO_NAME
    return path.name if os.path.isdir(os.path.expanduser(model)) else model


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: `model.safetensors`, or those that the index names.

    Raises:
        CheckpointError: there are none, the index is damaged, or it names a file that is missing or outside of the
            folder. (A file may be a link that leads out of it, as in the hub's cache.)
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    content = read_json(index, _MAX_INDEX_BYTES)
    if content is None:
        raise CheckpointError(f"{folder} holds neither {single.name} nor {index.name}: no weights in a form we read")
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
        CheckpointError: it cannot be read, is too large, or holds something else.
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
    """The text of a file, or None if there is no such file. Raises as `read_json` does."""
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


def shown(value: object) -> str:
    """A value of a file as shown in an error, shortened."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def _generation_defaults(generation: dict[str, Any], config: dict[str, Any], path: Path) -> GenerationDefaults:
    file = path / "generation_config.json"
    eos_file = file
    if (eos := generation.get("eos_token_id")) is None:
        eos, eos_file = config.get("eos_token_id"), path / "config.json"
    sampled = generation.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise CheckpointError(f"do_sample in {file} must be true or false, not {shown(sampled)}")
    top_k = _number(generation, "top_k", file)
    if top_k is not None and top_k != int(top_k):
        raise CheckpointError(f"top_k in {file} must be a whole number, not {top_k!r}")
    return GenerationDefaults(
        eos_token_ids=_token_ids(eos, eos_file),
        temperature=0.0 if sampled is False else _number(generation, "temperature", file),
        top_k=None if top_k is None else int(top_k),
        top_p=_number(generation, "top_p", file),
        min_p=_number(generation, "min_p", file),
        typical_p=_number(generation, "typical_p", file),
        repetition_penalty=_number(generation, "repetition_penalty", file),
    )


def _token_ids(eos: Any, file: Path) -> tuple[int, ...]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MAX_TOKEN_ID:
            raise CheckpointError(
                f"eos_token_id in {file} must be a token id from 0 on or a list of them, not {shown(eos)}"
            )
    return tuple(ids)


def _number(generation: dict[str, Any], key: str, file: Path) -> float | None:
    value = generation.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MAX_TOKEN_ID:  # or NaN
        raise CheckpointError(f"{key} in {file} must be a number, and no huge one, not {shown(value)}")
    return value
