"""`penstock serve`: an HTTP server, with options from flags, environment variables and a TOML file."""

import argparse

from penstock.cli.flags import add_positional_model, given_options, take_positional_model
from penstock.cli.parser import Parser
from penstock.cli.sources import show
from penstock.cli.topics import add_options
from penstock.config.engine_config import EngineConfig, iter_options
from penstock.server.config import ServerConfig, iter_server_options
from penstock.system.host import importing

SOURCES_HELP = (
    "Each option is also an environment variable (PENSTOCK_PORT=8000) and a key of the TOML file (port = 8000)."
)


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "serve",
        usage="%(prog)s [options] [MODEL]",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. " + SOURCES_HELP,
    )
    add_positional_model(parser)
    add_options(parser, [*iter_options(), *iter_server_options()])
    parser.common.add_argument(
        "--print-config", action="store_true", help="print every option with its source, and exit"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    groups = [("server", [f for _, f in iter_server_options()]), ("engine", [f for _, f in iter_options()])]
    take_positional_model(args)
    given = given_options(args)
    server, engine = ({f.name: given[f.name].value for f in group if f.name in given} for _, group in groups)
    config, engine_config = ServerConfig.from_options(**server), EngineConfig.from_options(**engine)
    if args.print_config:
        print(show(groups, config.options() | engine_config.options(), given))
        return 0
    with importing():
        from penstock.server.serve import serve

    return serve(engine_config, config)
