"""`penstock pull`: downloads a model from the hub, and compares its files with the hub's checksums."""

import argparse
import os
import sys
from pathlib import Path

from penstock.checkpoint.aliases import add_alias
from penstock.checkpoint.checkpoint import describe, open_checkpoint
from penstock.checkpoint.hub_cache import check_files, find_cached
from penstock.checkpoint.hub_download import download_large_files
from penstock.cli.parser import Parser
from penstock.errors import CheckpointError


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model, and give it a short name",
        description="Download a model from the Hugging Face hub to its cache on this machine, from where the other "
        "commands load it, also without a network. A download that was interrupted is resumed. Then the files are "
        "compared with the hub's checksums. HF_TOKEN is the key to private repositories, HF_ENDPOINT another hub.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="ORG/REPO or, for one of its GGUF files, ORG/REPO:Q4_K_M or ORG/REPO:FILE; also a path, with --as",
    )
    parser.add_argument("--revision", help="branch, tag or commit; default: the main branch")
    parser.add_argument("--as", dest="alias", metavar="NAME", help="a short name for --model, instead of MODEL")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    is_local = Path(os.path.expanduser(args.model)).exists()
    if not is_local:
        _begin(args.model, args.revision)
    checkpoint = open_checkpoint(args.model, revision=args.revision)
    if not is_local and (cached := find_cached(args.model, args.revision)) is not None:
        print(f"comparing {len(cached.files)} files with their checksums", file=sys.stderr, flush=True)
        check_files(cached.files)
    print(describe(checkpoint))
    print(checkpoint.path)
    if args.alias is not None:
        add_alias(args.alias, str(checkpoint.path) if is_local else args.model)
        print(f"{args.alias}: another name of {args.model}")
    return 0


def _begin(model: str, revision: str | None) -> None:
    """Download the model's large files; an interrupted download continues."""
    try:
        download_large_files(model, revision)
    except CheckpointError:
        raise
    except Exception as error:  # no network, or a bad id: what follows finds the model in the cache, or says so
        print(f"the hub gives no list of its files: {type(error).__name__}", file=sys.stderr, flush=True)
