"""Runs the parts one after another, each in a process of its own, and writes what they found after each."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

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
        with tempfile.TemporaryDirectory(prefix="gpu_day_", ignore_cleanup_errors=True) as scratch:
            self._run_all(parts, Path(scratch))
        return int(any(part["status"] not in ("ok", "unavailable") for part in self._parts))

    def _run_all(self, parts: Sequence[Part], scratch: Path) -> None:
        began = time.monotonic()
        if self.wheels is not None:
            wheels = Part("wheels", 1, "Installed wheels", "", 0.0)
            self._add(wheels, install(self.wheels, scratch / "site"), began)
        for part in parts:
            self._add(part, self._run(part, self.seconds - (time.monotonic() - began), scratch), began)
        print(f"{self.out / 'gpu_day.json'} and gpu_day.md: {time.monotonic() - began:.0f} s")

    def _add(self, part: Part, found: dict[str, Any], began: float) -> None:
        self._parts.append({"name": part.name, "section": part.section, "title": part.title, **found})
        self._save(time.monotonic() - began)
        reason = found.get("reason", "")[:160]
        print(f"{part.name:16} {found['status']:12} {found['seconds']:6.1f} s  {reason}", flush=True)

    def _save(self, seconds: float) -> None:
        results = {
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "device": self.device,
            "seconds": round(seconds, 1),
            "parts": self._parts,
        }
        write(self.out / "gpu_day.json", results)
        (self.out / "gpu_day.md").write_text(page(results))

    def _run(self, part: Part, left: float, scratch: Path) -> dict[str, Any]:
        if part.needs_gpu and self.device == "cpu":
            return {"status": "unavailable", "seconds": 0.0, "facts": {}, "reason": "needs a GPU"}
        if left < LEAST_SECONDS:
            return {"status": "skipped", "seconds": 0.0, "facts": {}, "reason": "no time was left"}
        limit, mark = min(part.seconds, left), uuid.uuid4().hex
        result, log = (self.out / f"{part.name}.{ending}" for ending in ("part", "log"))
        result.unlink(missing_ok=True)
        began = time.monotonic()
        with log.open("w") as output:
            process = self._start(part, result.resolve(), self._environment(mark, scratch), output)
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

    def _start(
        self, part: Part, result: Path, environment: dict[str, str], output: IO[str]
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tools.gpu.child", part.function, self.device, str(result)]
        return subprocess.Popen(
            [*command, *([str(self.wheels.resolve())] if self.wheels else [])],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _environment(self, mark: str, scratch: Path) -> dict[str, str]:
        """Of a part: what it leaves in its temporary folder goes with the run's."""
        paths = [str(ROOT), str(ROOT / "src"), str(scratch / "site"), os.environ.get("PYTHONPATH", "")]
        changed = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "TMPDIR": str(scratch)}
        changed |= {MARK: mark, "HF_HUB_OFFLINE": "1"}
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
