"""The ranks of an engine: rank 0 is the engine's own process, and the parent of the others.

    rank 0    schedules ── shares the plan ── computes ─┬─ samples
    rank 1    waits ────── takes it ───────── computes ─┘              `kernels.ranks` is what they exchange meanwhile

On a machine's CPUs they share memory; on GPUs, and without the native library, plans and columns go through
torch.distributed. When a rank ends, rank 0 raises DeviceLostError in its next step at the latest; when rank 0 ends, so
do the others.
"""

import base64
import contextlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed

from penstock import native
from penstock.checkpoint import Checkpoint
from penstock.core.plan import StepPlan, StepResult
from penstock.errors import ConfigError, DeviceLostError
from penstock.host import Seat, seats
from penstock.kernels.ops import make_ops
from penstock.kernels.ranks import Exchange
from penstock.kernels.ranks.native import SharedExchange, shared_file
from penstock.kernels.ranks.reference import DistributedExchange
from penstock.ranks import Ranks
from penstock.runner.torch_runner import TorchRunner
from penstock.settings import Settings

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that ranks have to end when they are told to."""


class Group(Protocol):
    """How a rank reaches the others."""

    @property
    def exchange(self) -> Exchange:
        """For the layers."""
        ...

    def share(self, message: bytes) -> bytes:
        """The first rank's message, of any length, at every rank; what the others give is not looked at."""
        ...

    def lose(self) -> None:
        """A rank has ended: whoever waits for it is to wait no longer. For another thread."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class SharedGroup:
    """Processes that share memory. See `Group`."""

    def __init__(self, exchange: SharedExchange) -> None:
        self.exchange = exchange
        self.share, self.lose = exchange.share, exchange.lose

    def close(self) -> None:
        """The memory goes with the last process."""


class DistributedGroup:
    """Processes that torch.distributed connects, wherever they are. See `Group`."""

    def __init__(self, ranks: Ranks, meeting: str, backend: str) -> None:
        """
        Args:
            meeting: where they find one another, as `init_process_group` takes it.
            backend: of the layers' exchange; plans go by gloo.
        """
        distributed.init_process_group(backend, init_method=meeting, rank=ranks.rank, world_size=ranks.size)
        world = distributed.group.WORLD
        assert world is not None
        self.exchange = DistributedExchange(world)
        self._plans = world if backend == "gloo" else distributed.new_group(backend="gloo")

    def share(self, message: bytes) -> bytes:
        size = torch.tensor([len(message)])
        distributed.broadcast(size, 0, self._plans)
        first = self.exchange.ranks.rank == 0
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8) if first and message else None
        if content is None:
            content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            distributed.broadcast(content, 0, self._plans)
        return content.numpy().tobytes()

    def lose(self) -> None:
        """The connection to it says so."""

    def close(self) -> None:
        distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """What the process of a rank is told."""

    model: Path
    settings: Settings
    ranks: Ranks
    seat: Seat
    shared: int | None
    """Descriptor of the memory that the ranks share; None: torch.distributed connects them."""
    meeting: str
    dies_with_thread: bool
    """Whether the thread that starts it lives as long as the engine."""

    @property
    def backend(self) -> str:
        return "nccl" if self.settings.device.startswith("cuda") else "gloo"

    def encode(self) -> bytes:
        """As a line."""
        return base64.b64encode(pickle.dumps(self)) + b"\n"

    @staticmethod
    def decode(line: bytes) -> "RankLaunch":
        """From a line of the parent's, whom the rank trusts."""
        launch = pickle.loads(base64.b64decode(line))
        assert isinstance(launch, RankLaunch)
        return launch

    def group(self) -> Group:
        """Join the others; waits for them where torch.distributed connects them."""
        if self.shared is None:
            return DistributedGroup(self.ranks, self.meeting, self.backend)
        library = native.library()
        assert library is not None
        return SharedGroup(SharedExchange(library, self.ranks, self.shared))

    def runner(self, checkpoint: Checkpoint, group: Group) -> TorchRunner:
        """The rank's part of the model."""
        with contextlib.suppress(OSError):  # a container may forbid it; the rank is right anywhere, only slower
            self.seat.take()
        return TorchRunner(checkpoint, self.settings, make_ops(torch.device(self.settings.device), group.exchange))


def start_runner(checkpoint: Checkpoint, settings: Settings) -> "AnyRunner":
    """What computes a model by these settings: in this process, or in several."""
    if settings.tensor_parallel_size == 1:
        return TorchRunner(checkpoint, settings)
    return RankedRunner(checkpoint, settings)


class RankedRunner:
    """Rank 0 of several: starts the others, and has them follow each of its steps. See `ModelRunner`.

    Raises:
        CheckpointError: as `TorchRunner`.
        ConfigError: there are fewer GPUs than ranks.
        DeviceLostError: a rank could not load its part.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        size = settings.tensor_parallel_size
        on_cpu = settings.device == "cpu"
        if not on_cpu:
            _check_gpus(settings.device, size, torch.cuda.device_count())
        library = native.library() if on_cpu else None
        shared = None if library is None else shared_file(library, size)
        self._folder = tempfile.mkdtemp(prefix="penstock-ranks-")
        places: Sequence[Seat] = seats(size) if on_cpu else [Seat()] * size
        launches = [
            RankLaunch(
                model=checkpoint.path,
                settings=replace(settings, device=_device(settings.device, rank)),
                ranks=Ranks(rank, size),
                seat=places[rank],
                shared=shared,
                meeting=f"file://{self._folder}/meeting",
                dies_with_thread=threading.current_thread() is threading.main_thread(),
            )
            for rank in range(size)
        ]
        self._group: Group | None = None
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for launch in launches[1:]:
                self._processes.append(_start(launch))
            self._group = launches[0].group()
            for process in self._processes:
                threading.Thread(target=self._watch, args=(process, self._group), daemon=True).start()
            self._runner = launches[0].runner(checkpoint, self._group)
            self._group.share(b"")  # every rank has loaded its part
        except BaseException:
            self._end(0.0)
            raise
        finally:
            if shared is not None:
                os.close(shared)

    @property
    def blocks(self) -> None:
        """Each rank has its part of a block."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def execute(self, plan: StepPlan) -> StepResult:
        """As `TorchRunner.execute`, but a step that fails is the last: the ranks would not be at one place.

        Raises:
            DeviceLostError: no further plan can be executed.
        """
        try:
            assert self._group is not None
            self._group.share(pickle.dumps((plan.forward, plan.prompt_logprobs.rows)))
            return self._runner.execute(plan)
        except BaseException as error:
            self._end(0.0)
            if isinstance(error, Exception) and not isinstance(error, DeviceLostError):
                raise DeviceLostError(f"a step of {len(self._processes) + 1} ranks failed: {error}") from error
            raise

    def close(self) -> None:
        """End the ranks and give the memory back; the runner is of no use afterwards."""
        if not self._closing and self._group is not None:
            self._closing = True
            with contextlib.suppress(Exception):  # one that is gone already
                self._group.share(pickle.dumps(None))
        self._end(GRACE)
        self._runner.close()

    def _watch(self, process: "subprocess.Popen[bytes]", group: Group) -> None:
        code = process.wait()
        if not self._closing:
            log.error("rank process %d of the engine has ended with code %d", process.pid, code)
            group.lose()

    def _end(self, grace: float) -> None:
        """Have no process left after `grace` seconds."""
        self._closing = True
        for process in self._processes:
            if grace:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if self._group is not None:
            self._group.lose()
            self._group.close()
            self._group = None
        shutil.rmtree(self._folder, ignore_errors=True)


AnyRunner = TorchRunner | RankedRunner


def _device(first: str, rank: int) -> str:
    """The device of a rank: GPUs from the first one's on."""
    return first if first == "cpu" else f"cuda:{_index(first) + rank}"


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _check_gpus(first: str, size: int, count: int) -> None:
    if _index(first) + size > count:
        raise ConfigError(
            f"tensor_parallel_size={size} needs as many GPUs from {first} on, and there are {count}: lower it"
        )


def _start(launch: RankLaunch) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.runner.rank_process"],
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=() if launch.shared is None else (launch.shared,),
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # killed already: whoever watches it says so
        process.stdin.write(launch.encode())
    return process


def follow(launch: RankLaunch, checkpoint: Checkpoint) -> None:
    """A rank other than the first: load its part, and do as the plans say until there is none."""
    group = launch.group()
    runner = launch.runner(checkpoint, group)
    group.share(b"")
    while (step := pickle.loads(group.share(b""))) is not None:
        runner.follow(*step)
