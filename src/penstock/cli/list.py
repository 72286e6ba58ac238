"""`penstock list`: the models on this machine, and their short names."""

import argparse
import json
import sys
import time
from dataclasses import asdict

from penstock.checkpoint.added import Added, AddedFile, added_files
from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.created import created_models
from penstock.checkpoint.hub_cache import cached_models
from penstock.cli.parser import Parser
from penstock.config.byte_counts import in_words
from penstock.errors import CheckpointError


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "list",
        help="list the models on this machine",
        description="List the models in the hub's cache on this machine, as --model takes them: size, when each was "
        "last read, and revision; models that Ollama's clients created; the short names that penstock pull --as "
        "gave; and the models, names and adapters that clients added to a server, which the next one of its port has.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    models, created, aliases = cached_models(), created_models(), read_aliases()
    servers = _servers()
    if args.json:
        listed = [
            {"model": model.name, "path": str(model.path), "bytes": model.num_bytes, "commit": model.commit}
            for model in models
        ]
        made = [{"model": model.name, "path": str(model.path), "bytes": model.num_bytes} for model in created]
        print(
            json.dumps(
                {
                    "models": listed,
                    "created": made,
                    "aliases": aliases,
                    "servers": {server: asdict(added) for server, added in servers.items()},
                }
            )
        )
        return 0
    if not (models or created or aliases):
        print("no models yet: penstock pull MODEL downloads one")
    rows = [
        (model.name, model.num_bytes, model.used, ", ".join(model.branches) or model.commit[:12]) for model in models
    ]
    rows += [(model.name, model.num_bytes, model.modified, "created") for model in created]
    width = max((len(name) for name, *_ in rows), default=0)
    for name, num_bytes, used, revision in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
        print(f"{name:<{width}}  {in_words(num_bytes):>10}  {when}  {revision}")
    for name, model_id in sorted(aliases.items()):
        print(f"{name}: {model_id}")
    for server, added in servers.items():
        kept = {**added.names, **{name: f"adapter of {one.model}" for name, one in added.adapters.items()}}
        for name, model in [
            *((name, "added") for name in added.models if name not in added.deleted),
            *sorted(kept.items()),
        ]:
            print(f"{name}: {model}, in the server of {server}")
    return 0


def _servers() -> dict[str, Added]:
    """What clients added to servers; damaged files are named on standard error, and do not hide the rest."""
    read = {file.path.stem: _read(file) for file in added_files()}
    return {server: added for server, added in read.items() if added is not None}


def _read(file: AddedFile) -> Added | None:
    try:
        return file.read()
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return None
