"""A checkpoint on disk: where it lies, and what its small JSON files say. No torch, no weights.

    model (folder, hub id or None) ──resolve_path──> folder ──open_checkpoint──> Checkpoint

None stands for the demo model, which is part of the package.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError

DEMO_FOLDER = Path(__file__).parent / "demo"
DEMO_NAME = "penstock-demo"

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
    config = _read_json(path / "config.json")
    if config is None:
        raise CheckpointError(f"{path} holds no config.json: not a Hugging Face model folder")
    generation = _read_json(path / "generation_config.json") or {}
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


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _generation_defaults(generation: dict[str, Any], config: dict[str, Any], path: Path) -> GenerationDefaults:
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    file = path / "generation_config.json"
    greedy = generation.get("do_sample") is False
    top_k = _number(generation, "top_k", file)
    return GenerationDefaults(
        eos_token_ids=_token_ids(eos, path),
        temperature=0.0 if greedy else _number(generation, "temperature", file),
        top_k=None if top_k is None else int(top_k),
        top_p=_number(generation, "top_p", file),
        min_p=_number(generation, "min_p", file),
        typical_p=_number(generation, "typical_p", file),
        repetition_penalty=_number(generation, "repetition_penalty", file),
    )


def _token_ids(eos: Any, path: Path) -> tuple[int, ...]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"eos_token_id in {path} must be a token id or a list of them, not {eos!r}")
    return tuple(ids)


def _number(generation: dict[str, Any], key: str, file: Path) -> float | None:
    value = generation.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise CheckpointError(f"{key} in {file} must be a number, not {value!r}")
    return value
