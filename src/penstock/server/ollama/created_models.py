"""What Ollama's routes say of models that are not loaded, by their files alone: created and served ones."""

import functools
import json
import os
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.created import CreatedModel, Recipe, created_models
from penstock.checkpoint.encoder_config import named_task
from penstock.checkpoint.summary import summarize
from penstock.errors import ConfigError, ModelNotFoundError
from penstock.parsers.conversation import format_of
from penstock.server.ollama.model_facts import details, model_info
from penstock.server.ollama.names import tagged
from penstock.server.ollama.schema import ListedModel, ShownModel
from penstock.text.tokenizer import chat_template_of

_MOST_READ = 256
"""Maximum number of models whose facts are cached."""


def listed_created(*served: str) -> list[ListedModel]:
    """The created models but those at the paths `served`. Reads files."""
    others = (model for model in created_models() if not any(Path(path).is_relative_to(model.path) for path in served))
    return [entry for model in others if (entry := _listed(model)) is not None]


@functools.lru_cache(maxsize=_MOST_READ)
def _listed(model: CreatedModel) -> ListedModel | None:
    try:
        checkpoint = open_checkpoint(str(model.path))
        summary = summarize(checkpoint)
        able = capabilities_of(checkpoint)
    except (ConfigError, OSError):  # such as a base that was deleted since
        return None
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "modified_at": summary.modified.isoformat(),
        "size": summary.num_bytes,
        "digest": summary.digest,
        "details": details(summary, _parent(checkpoint)),
        "capabilities": able,
    }


def shown_files(name: str, path: str) -> ShownModel:
    """
    Args:
        path: a folder or file.

    Raises:
        ConfigError: it cannot be read.
        ModelNotFoundError: its files are not on this machine.
    """
    if not os.path.exists(path):
        raise ModelNotFoundError(f"the files of {name!r} are downloaded when it is used for the first time", "model")
    checkpoint = open_checkpoint(path)
    summary, recipe = summarize(checkpoint), checkpoint.recipe or Recipe()
    lines = parameter_lines(recipe)
    context = recipe.num_ctx or summary.sizes.get("context_length", 0)
    shown: ShownModel = {
        "modelfile": modelfile(name, lines),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in lines),
        "template": chat_template_of(checkpoint.path),
        "details": details(summary, _parent(checkpoint)),
        "model_info": model_info(summary, name, {"context_length": context}),
        "capabilities": capabilities_of(checkpoint),
        "modified_at": summary.modified.isoformat(),
    }
    return with_recipe(shown, recipe)


def with_recipe(shown: ShownModel, recipe: Recipe | None) -> ShownModel:
    """The account of a model with its recipe's texts."""
    if recipe is not None:
        shown["modelfile"] += f"\nSYSTEM {json.dumps(recipe.system, ensure_ascii=False)}" * bool(recipe.system)
        if recipe.system:
            shown["system"] = recipe.system
        if recipe.license:
            shown["license"] = "\n".join(recipe.license)
        if recipe.messages:
            shown["messages"] = [
                {"role": message["role"], "content": message["content"]} for message in recipe.messages
            ]
    return shown


def modelfile(name: str, lines: list[tuple[str, str]]) -> str:
    """The text that Ollama would create the model from."""
    return "\n".join([f"FROM {name}", *(f"PARAMETER {name} {value}" for name, value in lines)])


def parameter_lines(recipe: Recipe) -> list[tuple[str, str]]:
    """The recipe's parameters as in a Modelfile, one pair a line."""
    found = []
    for name, value in recipe.parameters.items():
        values: list[Any] = value if isinstance(value, list) else [value]
        found += [(name, json.dumps(item) if isinstance(item, str) else str(item)) for item in values]
    return found


def _parent(checkpoint: Checkpoint) -> str:
    return tagged(checkpoint.recipe.base) if checkpoint.recipe is not None and checkpoint.recipe.base else ""


def capabilities_of(checkpoint: Checkpoint) -> list[str]:
    task = named_task(checkpoint)
    if task in ("embed", "score"):
        return ["embedding"] if task == "embed" else []
    template = chat_template_of(checkpoint.path)
    able = {
        "completion": True,
        "tools": bool(template),
        "vision": "vision_config" in checkpoint.config,
        "thinking": bool(template) and format_of(template).reasons,
    }
    return [name for name, is_able in able.items() if is_able]
