"""`penstock list`: the models on this machine, and their short names."""

import argparse
import json
import time

from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.hub_cache import cached_models
from penstock.cli.parser import Parser
from penstock.config.memory import in_words


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "list",
        help="list the models on this machine",
        description="List the models in the hub's cache on this machine, as --model takes them: size, when each was "
        "last read, and revision; and the short names that penstock pull --as gave.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    models, aliases = cached_models(), read_aliases()
    if args.json:
        listed = [
            {"model": model.name, "path": str(model.path), "bytes": model.num_bytes, "commit": model.commit}
            for model in models
        ]
        print(json.dumps({"models": listed, "aliases": aliases}))
        return 0
    if not models and not aliases:
        print("no models yet: penstock pull MODEL downloads one")
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used))
        revision = ", ".join(model.branches) or model.commit[:12]
        print(f"{model.name:<{width}}  {in_words(model.num_bytes):>10}  {used}  {revision}")
    for name, model_id in sorted(aliases.items()):
        print(f"{name}: {model_id}")
    return 0
