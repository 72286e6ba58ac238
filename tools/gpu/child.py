"""Runs one part in this process: `python -m tools.gpu.child FUNCTION DEVICE RESULT [WHEELS]`.

RESULT is written anew after each step of the part: {"status", "facts", ...}. It stays `running` if the process dies.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.parts import Facts, Place, UnavailableError


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file at once, so that no reader finds half of it."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)


def main(function: str, device: str, result: str, wheels: str = "") -> None:
    path, facts = Path(result), Facts()

    def told(status: str, **more: str) -> None:
        write(path, {"status": status, "facts": facts, **more})

    told("running")
    module, _, name = function.partition(":")
    try:
        for more in getattr(importlib.import_module(module), name)(Place(device, Path(wheels) if wheels else None)):
            facts.update(more)
            told("running")
    except UnavailableError as error:
        told("unavailable", reason=str(error))
    except ModuleNotFoundError as error:
        told("unavailable", reason=f"the Python package {error.name} is missing")
    except Exception as error:
        traceback.print_exc()
        told("failed", reason=f"{type(error).__name__}: {error}"[:1000])
    else:
        told("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
