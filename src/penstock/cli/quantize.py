"""`penstock quantize`: writes a quantized checkpoint."""

import argparse
from pathlib import Path

from penstock.cli.flags import add_config_flag, add_flags, engine_options
from penstock.cli.parser import Parser
from penstock.config.engine_config import EngineConfig, iter_options
from penstock.config.recipes import CHECKPOINT_RECIPES


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a quantized checkpoint",
        description="Quantize a model's matrices by GPTQ, layer by layer, and write a checkpoint in "
        "the layout of compressed-tensors (pack-quantized), which transformers reads, too. The same command resumes "
        "after an interruption.",
    )
    parser.add_argument("checkpoint", metavar="model", help="folder or hub id of a floating-point checkpoint")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--recipe", choices=list(CHECKPOINT_RECIPES), default="int4", help="formats of the matrices; default: int4"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text to calibrate with; default: text that the model generates",
    )
    add_flags(parser, [f for _, f in iter_options() if f.name == "threads"])
    add_config_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.system.extras import require_torch

    require_torch("penstock quantize")
    from penstock.quantizer.command import quantize

    config = EngineConfig.from_options(threads=engine_options(args).get("threads"))
    quantize(args.checkpoint, args.out, args.recipe, args.calibration, config.model.threads)
    return 0
