"""`penstock show`: a model's family, size, format, context and abilities."""

import argparse
import json
from collections.abc import Iterator

from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.created import find_created
from penstock.checkpoint.hub_cache import find_cached
from penstock.checkpoint.summary import summarize
from penstock.cli.parser import Parser
from penstock.config.byte_counts import in_words


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "show",
        help="describe a model",
        description="Describe a model from the headers of its files, without loading it: family, parameters, format, "
        "context, chat template, default sampling. A model of the hub that is not on this machine is downloaded first.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="hub id, path or short name; default: the demo model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    model = None if args.model is None else read_aliases().get(args.model, args.model)
    cached = None if model is None or find_created(model) is not None else find_cached(model)
    checkpoint = open_checkpoint(model if cached is None else str(cached.path))
    lines = list(_lines(checkpoint, args.model or checkpoint.name))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")
    return 0


def _lines(checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, str]]:
    from penstock.parsers.conversation import format_of  # imported when used: they take a third of a second
    from penstock.text.tokenizer import Tokenizer

    summary = summarize(checkpoint)
    yield "model", name
    yield "path", str(checkpoint.path)
    yield "family", summary.family or "unknown"
    if summary.parameters:
        yield "parameters", summary.parameters
    yield "format", f"{summary.format} {summary.quantization}, {in_words(summary.num_bytes)}"
    if "context_length" in summary.sizes:
        yield "context", f"{summary.sizes['context_length']:,} tokens"
    tokenizer = Tokenizer.load(checkpoint.path)
    if tokenizer is None:
        yield "tokenizer", "none: it takes token ids only"
    elif not tokenizer.has_chat_template:
        yield "chat template", "none: it continues text"
    else:
        known = format_of(tokenizer.chat_template_source)
        yield "tools", f"{known.tools.name}{'' if known.shows_tools else ', described by Penstock'}"
        yield "reasoning", "yes" if known.reasons else "no"
    sampling = {key: getattr(checkpoint.generation, key) for key in ("temperature", "top_k", "top_p", "min_p")}
    shown = ", ".join(f"{key} {value}" for key, value in sampling.items() if value is not None)
    yield "sampling", shown or "no defaults"
    if checkpoint.recipe is not None:
        recipe = checkpoint.recipe
        yield from ((name, json.dumps(value)) for name, value in recipe.parameters.items() if name not in sampling)
        yield from (("license", text.partition("\n")[0]) for text in recipe.license)
        if recipe.base:
            yield "from", recipe.base
        if recipe.system:
            yield "system", json.dumps(recipe.system, ensure_ascii=False)
        if recipe.messages:
            yield "messages", str(len(recipe.messages))
