"""What Ollama's routes say of created models that this server does not serve."""

import functools
import json
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.created import CreatedModel, Recipe, created_models
from penstock.checkpoint.gguf.config import pooling_of
from penstock.checkpoint.summary import summarize
from penstock.errors import ConfigError
from penstock.server.ollama.model_facts import details, model_info
from penstock.server.ollama.names import tagged
from penstock.server.ollama.schema import ListedModel, ShownModel
from penstock.text.tokenizer import has_chat_template

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


def shown_created(name: str, folder: Path) -> ShownModel:
    """
    Raises:
        ConfigError: it cannot be read.
    """
    checkpoint = open_checkpoint(str(folder))
    summary, recipe = summarize(checkpoint), checkpoint.recipe or Recipe()
    lines = parameter_lines(recipe)
    context = recipe.num_ctx or summary.sizes.get("context_length", 0)
    shown: ShownModel = {
        "modelfile": modelfile(name, lines),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in lines),
        "template": recipe.template or "",
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
    if checkpoint.gguf is not None and pooling_of(checkpoint.gguf) is not None:
        return ["embedding"]
    return ["completion", "tools"] if has_chat_template(checkpoint.path) else ["completion"]
