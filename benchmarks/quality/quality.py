"""Perplexity beside float32, and how often the likeliest token is the same, on the kit's real model and texts.

    python -m benchmarks.quality.quality MODELS [--options "" quantization=int8 quantization=int4] [--peers] [--texts
        FILE ...]

MODELS is the folder that `../shared/quality/real_model.py` wrote. Penstock runs on MODELS/hf by each of the options, on
MODELS/q-* (what `penstock quantize` wrote) and on MODELS/*.gguf as they are. With --peers llama.cpp runs on the same
files and OpenVINO on MODELS/openvino-*, each in its environment of the peers' kit. Rows go to
results/<machine>/quality.json; with --texts, which takes the first 3,000 characters of each FILE instead of the kit's
texts, they are only printed.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import results_file, save

KIT = Path(__file__).parents[3] / "shared" / "quality"
PEERS = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/penstock-peers"))
Predictions = list[tuple[list[float], list[int]]]
"""Of each text the log-probability of every token, and the likeliest ids."""


def predictions(kit: Path, python: str, engine: str, model: Path, tokenizer: Path, options: list[str]) -> Predictions:
    command = [python, str(kit / "nll.py"), engine, str(model), str(tokenizer), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    results: Predictions = json.loads(done.stdout.splitlines()[-1])["results"]
    return results


def compare(ours: Predictions, truth: Predictions) -> dict[str, float]:
    logprobs, likeliest = ([value for text in ours for value in text[part]] for part in (0, 1))
    true_logprobs, true_likeliest = ([value for text in truth for value in text[part]] for part in (0, 1))
    perplexity, exact = (math.exp(-sum(values) / len(values)) for values in (logprobs, true_logprobs))
    same = sum(a == b for a, b in zip(likeliest, true_likeliest, strict=True)) / len(likeliest)
    distance = sum(abs(a - b) for a, b in zip(logprobs, true_logprobs, strict=True)) / len(logprobs)
    return {
        "perplexity": round(perplexity, 3),
        "over float32 %": round(100 * (perplexity / exact - 1), 2),
        "same token %": round(100 * same, 2),
        "mean distance": round(distance, 4),
    }


def kit_with(texts: list[Path], folder: Path) -> Path:
    """`folder` with a copy of the kit's program that reads the beginnings of `texts`."""
    shutil.copy(KIT / "nll.py", folder)
    (folder / "texts.json").write_text(json.dumps([text.read_text()[:3000] for text in texts]))
    return folder


def runs(models: Path, options: list[str], *, peers: bool) -> Iterator[tuple[str, str, str, Path, list[str]]]:
    """(name, python, engine, model, options) of each row."""
    for option in options:
        yield (
            f"penstock {option or 'bf16'}",
            sys.executable,
            "penstock",
            models / "hf",
            option.split(",") if option else [],
        )
    for folder in sorted(models.glob("q-*")):
        yield f"penstock {folder.name}", sys.executable, "penstock", folder, []
    for file in sorted(models.glob("*.gguf")):
        yield f"penstock {file.stem}", sys.executable, "penstock", file, []
    if peers:
        for file in sorted(models.glob("*.gguf")):
            yield f"llama.cpp {file.stem}", str(PEERS / "llamacpp/bin/python"), "llamacpp", file, []
        for folder in sorted(models.glob("openvino-*")):
            yield folder.name, str(PEERS / "openvino/bin/python"), "openvino", folder, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("--options", nargs="*", default=["", "quantization=int8", "quantization=int4"])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--texts", nargs="*", type=Path, default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kit = kit_with(args.texts, Path(folder)) if args.texts else KIT
        measure(args, kit)


def measure(args: argparse.Namespace, kit: Path) -> None:
    tokenizer = args.models / "hf"
    truth = predictions(kit, sys.executable, "transformers", tokenizer, tokenizer, [])
    file = results_file("quality")
    rows = json.loads(file.read_text()) if file.exists() else {}
    for name, python, engine, model, options in runs(args.models, args.options, peers=args.peers):
        rows[name] = compare(predictions(kit, python, engine, model, tokenizer, options), truth)
        print(f"{name:40}", rows[name], flush=True)
        if kit == KIT:
            save("quality", rows)


if __name__ == "__main__":
    main()
