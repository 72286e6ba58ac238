"""What a GPU says: measures one in at most ten minutes, without a network, and writes a JSON and a Markdown page.

    python tools/gpu_day.py [OUT] [--device cpu] [--wheels FOLDER] [--parts NAME,...] [--seconds 570]
    python tools/gpu_day.py --prepare FOLDER [--python 3.12] [--peers transformers,vllm]

Run `--prepare` where a package registry is reached, and pass its folder as `--wheels` where the GPU is. OUT is a folder
(default: gpu_day); gpu_day.json and gpu_day.md there are complete after each part. Each part runs in a process of its
own, within its own time, so a part that fails, hangs or dies costs no other. `--device cpu` runs, for tests, all that
needs no GPU: Triton in its interpreter, small shapes. See docs/gpu.md.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.gpu.parts import PARTS
from tools.gpu.prepare import prepare
from tools.gpu.runner import Runner


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu_day"), help="folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, help="folder that --prepare filled")
    parser.add_argument("--parts", default="", help="names, with commas between; default: all")
    parser.add_argument("--seconds", type=float, default=570.0, help="most seconds of all parts together")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="download the wheels, and measure nothing")
    parser.add_argument("--python", default="3.12", help="with --prepare: the version of Python where the GPU is")
    parser.add_argument("--peers", default="", help="with --prepare: peers to download as well, with commas between")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.prepare is not None:
        return prepare(options.prepare, options.python, [peer for peer in options.peers.split(",") if peer])
    names = [name for name in options.parts.split(",") if name]
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        print(f"no part is called {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
        return 2
    wanted = [part for part in PARTS if not names or part.name in names]
    return Runner(options.out, options.device, options.seconds, options.wheels).run(wanted)


if __name__ == "__main__":
    sys.exit(main())
