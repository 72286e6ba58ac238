"""Runs the parts one after another, each in a process of its own, and writes what they found after each."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu.child import write
from tools.gpu.page import page
from tools.gpu.parts import Part
from tools.gpu.prepare import install

ROOT = Path(__file__).resolve().parents[2]
MARK = "GPU_DAY_PART"
"""Environment variable by which a part's processes are known; not PENSTOCK_..., which would be an option."""
LEAST_SECONDS = 5.0
"""A part is not begun with less time than this."""
KEPT_OUTPUT = 3000
"""Characters of a part's output that are kept if it is not well."""


@dataclass
class Runner:
    """One run. `out` is a folder, which is made."""

    out: Path
    device: str
    seconds: float
    wheels: Path | None = None
    _parts: list[dict[str, Any]] = field(default_factory=list)

    def run(self, parts: Sequence[Part]) -> int:
        """Run the parts and print a line for each. Returns the exit code: 1 if one failed."""
        self.out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        site = self.out / "site"
        if self.wheels is not None:
            self._parts.append(
                {"name": "wheels", "section": 1, "title": "Installed wheels", **install(self.wheels, site)}
            )
        for part in parts:
            left = self.seconds - (time.monotonic() - began)
            self._parts.append(
                {"name": part.name, "section": part.section, "title": part.title, **self._run(part, left, site)}
            )
            self._save(time.monotonic() - began)
            last = self._parts[-1]
            print(
                f"{part.name:16} {last['status']:12} {last['seconds']:6.1f} s  {last.get('reason', '')[:160]}",
                flush=True,
            )
        print(f"{self.out / 'gpu_day.json'} and gpu_day.md: {time.monotonic() - began:.0f} s")
        return int(any(part["status"] not in ("ok", "unavailable") for part in self._parts))

    def _save(self, seconds: float) -> None:
        results = {
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "device": self.device,
            "seconds": round(seconds, 1),
            "parts": self._parts,
        }
        write(self.out / "gpu_day.json", results)
        (self.out / "gpu_day.md").write_text(page(results))

    def _run(self, part: Part, left: float, site: Path) -> dict[str, Any]:
        if part.needs_gpu and self.device == "cpu":
            return {"status": "unavailable", "seconds": 0.0, "facts": {}, "reason": "needs a GPU"}
        if left < LEAST_SECONDS:
            return {"status": "skipped", "seconds": 0.0, "facts": {}, "reason": "no time was left"}
        limit, mark = min(part.seconds, left), uuid.uuid4().hex
        result, log = (self.out / f"{part.name}.{ending}" for ending in ("part", "log"))
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tools.gpu.child", part.function, self.device, str(result.resolve())]
        began = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *([str(self.wheels.resolve())] if self.wheels else [])],
                cwd=ROOT,
                env=self._environment(mark, site),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            end_processes(mark)  # servers that the part started, too
            process.wait()
        found = _outcome(result, code, limit)
        found["seconds"] = round(time.monotonic() - began, 1)
        if found["status"] != "ok":
            found["output"] = log.read_text(errors="replace")[-KEPT_OUTPUT:]
        result.unlink(missing_ok=True)
        log.unlink()
        return found

    def _environment(self, mark: str, site: Path) -> dict[str, str]:
        paths = [str(ROOT), str(ROOT / "src"), str(site.resolve()), os.environ.get("PYTHONPATH", "")]
        changed = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), MARK: mark, "HF_HUB_OFFLINE": "1"}
        if self.device == "cpu":
            changed |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # small shapes
        return os.environ | changed


def _outcome(result: Path, code: int | None, limit: float) -> dict[str, Any]:
    """What a part's file says, and how its process ended; `code` None: it was stopped."""
    try:
        found: dict[str, Any] = json.loads(result.read_text())
    except (OSError, ValueError):
        found = {"status": "running", "facts": {}}
    if found["status"] == "running":  # it did not come to its end
        if code is None:
            return found | {"status": "timeout", "reason": f"stopped after {limit:.0f} s"}
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return found | {"status": "died", "reason": f"its process {how}"}
    return found


def end_processes(mark: str) -> None:
    """Kill the processes that have this mark in their environment, until there is none."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(50):
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _has(entry, wanted)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _has(process: Path, entry: bytes) -> bool:
    try:
        return entry in (process / "environ").read_bytes().split(b"\0")  # a zombie's is empty
    except OSError:
        return False
