"""`penstock cache`: lists and clears the packed weights cached on disk."""

import argparse
import time
from pathlib import Path

from penstock.cli.flags import add_config_flag, add_flags, engine_options
from penstock.cli.parser import Parser
from penstock.config.byte_counts import in_words
from penstock.config.engine_config import EngineConfig, iter_options
from penstock.config.settings import packed_cache_folder
from penstock.errors import ConfigError
from penstock.system.weight_cache import CachedFile, WeightCache


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "cache",
        help="list or empty the cache of packed weights",
        description="List the packed weights that earlier starts cached on disk, so that later ones load a model in a "
        "second: their sizes, when each was last used, and its model. The folder takes up to a quarter of the disk's "
        "free space, and 64 GiB; what was not used for longest is deleted first. Models from the hub are elsewhere, in "
        "Hugging Face's cache.",
    )
    parser.add_argument("--clear", action="store_true", help="delete all; running servers keep what they have mapped")
    add_flags(parser, [f for _, f in iter_options() if f.name == "packed_cache"])
    add_config_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    wanted = EngineConfig.from_options(packed_cache=engine_options(args).get("packed_cache", "auto")).model.packed_cache
    folder = packed_cache_folder(wanted)
    if folder is None:
        raise ConfigError("packed_cache is off: there is nothing to list; name its folder, or leave it out")
    cache = WeightCache(Path(folder))
    try:
        if args.clear:
            print(f"{folder}: deleted {_count(cache.clear())}")
        else:
            _list(folder, cache)
    except OSError as error:
        raise ConfigError(
            f"the packed weights in {folder} cannot be {'deleted' * args.clear or 'listed'}: {error}"
        ) from None
    return 0


def _list(folder: str, cache: WeightCache) -> None:
    files = cache.files()
    if not files:
        print(f"{folder}: no packed weights")
        return
    print(f"{folder}: {_count(files)}, of at most {in_words(cache.usage()[1])}")
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
        print(f"{in_words(file.size):>10}  {used}  {file.about}")


def _count(files: list[CachedFile]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}, {in_words(sum(file.size for file in files))}"
