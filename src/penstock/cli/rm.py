"""`penstock rm`: deletes a model from this machine, or a short name."""

import argparse

from penstock.checkpoint.added import forget, forget_name
from penstock.checkpoint.aliases import remove_alias
from penstock.checkpoint.created import LATEST, remove_created
from penstock.checkpoint.hub_cache import cached_models, find_cached, remove_cached
from penstock.cli.parser import Parser
from penstock.config.byte_counts import in_words
from penstock.errors import CheckpointError


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "rm",
        help="delete a model or a short name",
        description="Delete a model from the hub's cache on this machine, a model that a client of Ollama's created, "
        "a short name, or a name or adapter that a client of Ollama's gave to a model, which stays. A server that runs "
        "has it until it ends. Models elsewhere are never deleted, nor packed weights, which penstock "
        "cache --clear deletes.",
    )
    parser.add_argument("model", metavar="MODEL", help="as penstock list prints it")
    parser.add_argument("--revision", help="branch, tag or commit; default: the main branch")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if remove_alias(args.model):
        forget([args.model])
        print(f"{args.model}: deleted the short name")
        return 0
    if (freed := remove_created(args.model)) is not None:
        forget([args.model.removesuffix(LATEST)])
        print(f"{args.model}: deleted {in_words(freed)}")
        return 0
    if forget_name(args.model):
        print(f"{args.model}: deleted the name, which a running server has until it ends")
        return 0
    cached = find_cached(args.model, args.revision)
    if cached is None:
        raise CheckpointError(f"no model {args.model} is in the hub's cache; penstock list prints those that are")
    remove_cached(cached)
    if args.revision is None or all(other.name != cached.name for other in cached_models()):
        forget([args.model, cached.name])
    print(f"{cached.name}: deleted {in_words(cached.num_bytes)}")
    return 0
