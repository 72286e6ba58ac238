"""`penstock verify` on a random checkpoint of every architecture in the registry, in bfloat16, int8 and int4.

    python -m benchmarks.quality.families [ARCHITECTURE ...] [--weights bfloat16 int8 int4] [--all-cases]

Checkpoints are the tiny ones of tests/support/families.py: the first of each architecture, or every one with
`--all-cases`. Prints a line each (the situations that were clean, or the first that was not), and writes
results/<machine>/families.json. Exits with 1 if an answer depended on anything, or a situation was not reached.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import results_file
from penstock import native
from penstock.diagnose.verify import SelfTest, self_test_config
from penstock.engine.build import build_engine
from penstock.errors import PenstockError
from penstock.models.architectures import ARCHITECTURES
from tests.support.checkpoints import write_random
from tests.support.families import CASES, MULTIMODAL, SHAPE, class_name

WEIGHTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def cases(architecture: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The random checkpoints that there are of an architecture: names, and what `write_random` makes them of."""
    texts = {
        name: (family, SHAPE | config) for name, (family, config) in CASES.items() if class_name(family) == architecture
    }
    return texts | {f"{name}, its text": case for name, case in MULTIMODAL.items() if case[0] == architecture}


def verify(folder: Path, options: dict[str, Any]) -> tuple[bool, str]:
    """Whether all was clean, and what there is to tell."""
    try:
        test = SelfTest(build_engine(self_test_config(model=str(folder), kv_cache_memory="64MiB", **options)))
    except PenstockError as error:
        return False, f"does not start: {error}"
    try:
        findings = list(test.findings())
    finally:
        test.close()
    bad = next((finding for finding in findings if not finding.clean), None)
    if bad is None:
        return True, f"{len(findings)} situations"
    return False, f"{bad.situation}: {bad.difference or 'not reached'} ({bad.evidence})"


def keep(name: str, row: dict[str, str]) -> None:
    """Add to this machine's results, or replace what is there of the same checkpoint."""
    file = results_file("families")
    table: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    table[name] = table.get(name, {}) | row
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES), metavar="ARCHITECTURE")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--all-cases", action="store_true")
    arguments = parser.parse_args()
    failures = 0
    for architecture in arguments.architectures:
        for name, (family, config) in list(cases(architecture).items())[: None if arguments.all_cases else 1]:
            row: dict[str, str] = {}
            with tempfile.TemporaryDirectory() as folder:
                write_random(Path(folder), family, dtype="bfloat16", **config)
                for weights in arguments.weights:
                    clean, row[weights] = verify(Path(folder), WEIGHTS[weights])
                    failures += not clean
                    told = row[weights] if clean else f"FAILED: {row[weights]}"
                    print(f"{architecture:36} {name:30.30} {weights:9} {told}", flush=True)
            keep(f"{architecture}: {name}", row)
    return int(failures > 0)


if __name__ == "__main__":
    native.set_num_threads(1)  # tiny matrices are faster so
    sys.exit(main())
