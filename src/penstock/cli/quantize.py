"""`penstock quantize`: a checkpoint of fewer bits, written once."""

import argparse
from pathlib import Path

from penstock.recipes import CHECKPOINT_RECIPES


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint of 4 bits a weight",
        description="Round a model's matrices with error feedback (GPTQ), layer by layer, and write a checkpoint in "
        "the layout of compressed-tensors (pack-quantized), which transformers and vLLM read too. A call that was "
        "interrupted goes on where it was when it is made again.",
    )
    parser.add_argument("model", help="folder or hub id of a checkpoint in floating point")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--recipe", choices=list(CHECKPOINT_RECIPES), default="int4", help="default: int4")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="text to calibrate with; default: text that the model writes"
    )
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.quantizer.command import quantize

    quantize(args.model, args.out, args.recipe, args.calibration, args.threads)
    return 0
