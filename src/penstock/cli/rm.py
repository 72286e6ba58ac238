"""`penstock rm`: deletes a model from this machine, or a short name."""

import argparse

from penstock.checkpoint.added import delete_created, forget, forget_name, with_servers
from penstock.checkpoint.aliases import remove_alias
from penstock.checkpoint.created import LATEST, find_created
from penstock.checkpoint.hub_cache import cached_models, find_cached, remove_cached
from penstock.cli.parser import Parser
from penstock.config.byte_counts import in_words
from penstock.errors import CheckpointError


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "rm",
        help="delete a model or a short name",
        description="Delete a model from the hub's cache on this machine, a model that a client of Ollama's created, "
        "a short name, or a name or adapter that a client of Ollama's gave to a model, which stays. The files of a "
        "created model stay until its last name on a server is deleted. A server that runs has a name until it ends. "
        "Models elsewhere are never deleted, nor packed weights, which penstock cache --clear deletes.",
    )
    parser.add_argument("model", metavar="MODEL", help="as penstock list prints it")
    parser.add_argument("--revision", help="branch, tag or commit; default: the main branch")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if remove_alias(args.model):
        forget([args.model])
        print(f"{args.model}: deleted the short name")
        return 0
    if find_created(args.model) is not None:
        _remove_created(args.model)
        return 0
    if (last_named := forget_name(args.model)) is not None:
        print(f"{args.model}: deleted the name, which a running server has until it ends")
        for model in filter(find_created, last_named):
            _remove_created(model)
        return 0
    cached = find_cached(args.model, args.revision)
    if cached is None:
        raise CheckpointError(f"no model {args.model} is in the hub's cache; penstock list prints those that are")
    remove_cached(cached)
    if args.revision is None or all(other.name != cached.name for other in cached_models()):
        forget([args.model, cached.name])
    print(f"{cached.name}: deleted {in_words(cached.num_bytes)}")
    return 0


def _remove_created(given: str) -> None:
    """Delete a created model or, if it has other names, its own name alone, as Ollama's API does.

    Raises:
        CheckpointError: it has other names alone, or cannot be deleted.
    """
    freed, others = delete_created(given)
    name = given.removesuffix(LATEST)
    if others:
        print(f"{name}: deleted the name; its files stay for its other names: {with_servers(others)}")
    else:
        print(f"{name}: deleted {in_words(freed)}")
