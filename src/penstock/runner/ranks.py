"""The ranks of an engine: rank 0 is the engine's own process, and the parent of the others.

    rank 0    schedules ── shares the plan ── computes ─┬─ samples
    rank 1    waits ────── receives it ────── computes ─┘              layers exchange columns by `kernels.ranks`

On the CPUs of one machine ranks use shared memory; on GPUs, and without the native library, plans and columns go
through torch.distributed. When a rank ends, rank 0 raises DeviceLostError in its next step at the latest; when rank 0
ends, so do the others.

If the ranks span several nodes (`Settings.rendezvous`), each node's host starts its own (`frontend.cluster.host`); they
connect to rank 0, which sends them what to load. Plans are encrypted (`rank_network`), columns go through
torch.distributed.
"""

import base64
import contextlib
import logging
import os
import pickle
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import native
from penstock.api.request import Adapter
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config.ranks import RANK_PROCESS, RankJoin, Ranks, Rendezvous
from penstock.config.settings import Settings
from penstock.core.plan import ForwardPlan, StepPlan, StepResult
from penstock.dataclass import dataclass
from penstock.errors import ConfigError, DeviceLostError
from penstock.kernels.ranks.native import SharedMemoryCollective, shared_file
from penstock.kernels.tables import make_ops
from penstock.runner.device_runner import DeviceRunner
from penstock.runner.fingerprint import arithmetic
from penstock.runner.mtp_runner import MTPRunner, MTPStep
from penstock.runner.rank_adapters import AdapterChange, FollowedAdapters
from penstock.runner.rank_blocks import RankedBytes, ranked_blocks
from penstock.runner.rank_folder import RankFolder
from penstock.runner.rank_groups import Group, SharedGroup
from penstock.runner.torch_device import num_gpus
from penstock.system.extras import require_torch
from penstock.system.host import CpuBinding, cpu_bindings, start_child
from penstock.system.start import Start

if TYPE_CHECKING:
    from penstock.runner.rank_network import PlanSource

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that ranks have to exit after the request to stop."""
_SEVERAL_NODES = "an engine on several nodes"


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Launch options of a rank's process."""

    model: Path
    settings: Settings
    ranks: Ranks
    binding: CpuBinding
    shared: int | None
    """File descriptor of the ranks' shared memory; None: torch.distributed connects them."""
    rendezvous: str
    """Rendezvous address for torch.distributed."""
    hf_overrides: str | None = None
    """JSON object that replaces settings of the model's config.json."""
    mmproj: str | None = None
    """The mmproj file of a GGUF model, if the user named one."""

    @property
    def backend(self) -> str:
        return "nccl" if self.settings.device.startswith("cuda") else "gloo"

    def encode(self) -> bytes:
        """Encode as one line."""
        return base64.b64encode(pickle.dumps(self)) + b"\n"

    @staticmethod
    def decode(line: bytes) -> "RankLaunch":
        """Decode the parent's line. The rank trusts its parent."""
        launch = pickle.loads(base64.b64decode(line))
        assert isinstance(launch, RankLaunch)
        return launch

    def group(self) -> Group:
        """Join the other ranks; over torch.distributed, wait for them."""
        if self.shared is None:
            from penstock.runner.torch_groups import DistributedGroup

            return DistributedGroup(self.ranks, self.rendezvous, self.backend)
        library = native.library()
        assert library is not None
        return SharedGroup(SharedMemoryCollective(library, self.ranks, self.shared))

    def runner(self, checkpoint: Checkpoint, group: Group, start: Start | None = None) -> DeviceRunner:
        """Load the rank's part of the model."""
        with contextlib.suppress(OSError):  # a container may forbid it; then the rank is only slower
            self.binding.apply()
        settings, start = self.settings, start or Start()
        ops = make_ops(
            settings.device,
            group.collective,
            gap=settings.gap,
            widened_weights=settings.widened_weights,
            allocator=start.allocator,
        )
        return DeviceRunner(checkpoint, settings, ops, start)


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Rank 0's message to each rank that connects, in an engine on several nodes."""

    settings: Settings
    arithmetic: str
    """Fingerprint of rank 0's arithmetic; see `runner.fingerprint`."""

    def launch(self, join: RankJoin, checkpoint: Checkpoint) -> RankLaunch:
        """The launch options of a rank on its own node.

        Raises:
            ConfigError: this node would not compute exactly as the first one does.
        """
        if arithmetic(checkpoint, self.settings) != self.arithmetic:
            raise ConfigError(
                f"rank {join.ranks.rank} would not compute as rank 0 does: all nodes of an engine need the same "
                "instruction set, versions of penstock and torch, and files of the model"
            )
        own = join.rendezvous.of_node(join.rendezvous.node_of(join.ranks), join.ranks.size)
        index = own.index(join.ranks.rank)
        return RankLaunch(
            model=checkpoint.path,
            settings=replace(self.settings, device=_device(self.settings.device, index)),
            ranks=join.ranks,
            binding=cpu_bindings(len(own))[index] if self.settings.device == "cpu" else CpuBinding(),
            shared=None,
            rendezvous="",
            hf_overrides=checkpoint.hf_overrides,
            mmproj=checkpoint.mmproj,
        )


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step, as rank 0 sends it to the others."""

    forward: ForwardPlan
    logits_of: list[int]
    """Rows whose logits rank 0 needs besides the sampled ones."""
    changes: list[AdapterChange]


class RankedRunner:
    """Rank 0 of several: starts the others and sends them each step. See `ModelRunner`.

    Raises:
        CheckpointError: see `DeviceRunner`.
        ConfigError: there are fewer GPUs than ranks.
        DeviceLostError: a rank could not load its shard.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings, start: Start | None = None) -> None:
        """`start`: see `runners.start_runner`."""
        self._folder: RankFolder | None = None
        self._group: Group | None = None
        self._plans: PlanSource | None = None
        self._closing = False
        self._changes: deque[AdapterChange] = deque()
        """Changes not yet sent to the other ranks; appended by the thread that loads adapters."""
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            if settings.rendezvous is None:
                first, self._group = self._start_here(checkpoint, settings)
            else:
                first, self._group = self._start_on_nodes(checkpoint, settings, settings.rendezvous)
            for process in self._processes:
                threading.Thread(target=self._watch, args=(process, self._group), daemon=True).start()
            self._runner = first.runner(checkpoint, self._group, start)
            self._group.broadcast(b"")  # wait until every rank has loaded its part
            self._moves_blocks = settings.moves_blocks
            self.blocks = self._blocks_of_all(self._group) if settings.moves_blocks else None
            """The KV cache's blocks by groups, as bytes; None: not needed."""
        except BaseException:
            self._end(0.0)
            raise

    def _start_here(self, checkpoint: Checkpoint, settings: Settings) -> tuple[RankLaunch, Group]:
        """Start the other ranks on this machine, and join them."""
        size, on_cpu = settings.tensor_parallel_size, settings.device == "cpu"
        if not on_cpu:
            _check_gpus(settings.device, size, num_gpus())
        library = native.library() if on_cpu else None
        shared = None if library is None else shared_file(library, size)
        if shared is None:
            self._folder = RankFolder()
        places: Sequence[CpuBinding] = cpu_bindings(size) if on_cpu else [CpuBinding()] * size
        launches = [
            RankLaunch(
                model=checkpoint.path,
                settings=replace(settings, device=_device(settings.device, rank)),
                ranks=Ranks(rank, size),
                binding=places[rank],
                shared=shared,
                rendezvous="" if self._folder is None else f"file://{self._folder.path}/rendezvous",
                hf_overrides=checkpoint.hf_overrides,
                mmproj=checkpoint.mmproj,
            )
            for rank in range(size)
        ]
        try:
            for launch in launches[1:]:
                descriptors = () if launch.shared is None else (launch.shared,)
                self._processes.append(start_child(RANK_PROCESS, launch.encode(), descriptors))
            return launches[0], launches[0].group()
        finally:
            if shared is not None:
                os.close(shared)

    def _start_on_nodes(
        self, checkpoint: Checkpoint, settings: Settings, rendezvous: Rendezvous
    ) -> tuple[RankLaunch, Group]:
        """Start the other ranks of this node, wait for those of all nodes, and send each its `RankOrder`."""
        require_torch(_SEVERAL_NODES)
        size = settings.tensor_parallel_size
        own = rendezvous.of_node(0, size)
        if settings.device != "cpu":
            _check_gpus(settings.device, len(own), num_gpus())
        order = RankOrder(replace(settings, rendezvous=None), arithmetic(checkpoint, settings))
        for rank in own[1:]:
            join = RankJoin(
                rendezvous,
                str(checkpoint.path),
                Ranks(rank, size),
                hf_overrides=checkpoint.hf_overrides,
                mmproj=checkpoint.mmproj,
            )
            self._processes.append(start_child(RANK_PROCESS, join.encode()))
        from penstock.runner.rank_network import PlanSource  # ZeroMQ, for ranks on several nodes alone

        self._plans = PlanSource(rendezvous)
        for index in range(size - 1):
            while not self._plans.await_rank():
                if any(process.poll() is not None for process in self._processes):
                    raise DeviceLostError("a rank of the engine ended while it started")
            self._plans.send(index, pickle.dumps(order))
        first = order.launch(RankJoin(rendezvous, str(checkpoint.path), Ranks(0, size)), checkpoint)
        from penstock.runner.torch_groups import NetworkGroup

        return first, NetworkGroup(first.ranks, rendezvous, first.backend, self._plans)

    def _blocks_of_all(self, group: Group) -> list[RankedBytes] | None:
        return ranked_blocks(self._runner.blocks, group.collective)

    def start_head(self, checkpoint: Checkpoint, settings: Settings) -> MTPRunner:
        """Load the multi-token prediction head on every rank; `settings` are the head's own.

        Raises:
            DeviceLostError: a rank could not load its shard.
        """
        group = self._group
        assert group is not None
        head = MTPRunner(self._runner, checkpoint, settings, lambda step: _send_to_ranks(group, step))
        group.broadcast(b"")  # wait until every rank has loaded its part
        return head

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def execute(self, plan: StepPlan) -> StepResult:
        """Like `DeviceRunner.execute`, but no step can follow one that failed: the ranks would be out of step.

        Raises:
            DeviceLostError: no further plan can be executed.
        """
        try:
            assert self._group is not None
            # By count: the thread that loads adapters may append meanwhile.
            changes = [self._changes.popleft() for _ in range(len(self._changes))]
            self._group.broadcast(pickle.dumps(RankStep(plan.forward, plan.prompt_logprobs.rows, changes)))
            result = self._runner.execute(plan)
            if self._moves_blocks:
                # A barrier: no collective operation may have followed the last layer, and its keys must be stored.
                self._group.broadcast(b"")
            return result
        except BaseException as error:
            self._end(0.0)
            if isinstance(error, Exception) and not isinstance(error, DeviceLostError):
                raise DeviceLostError(f"a step of {len(self._processes) + 1} ranks failed: {error}") from error
            raise

    def load_adapter(self, adapter: Adapter) -> None:
        """See `DeviceRunner.load_adapter`. The other ranks get the load with the next step and run it beside that."""
        self._changes.append(AdapterChange(adapter, is_loaded=True))
        try:
            self._runner.load_adapter(adapter)
        except BaseException:
            self._changes.append(AdapterChange(adapter, is_loaded=False))
            raise

    def drop_adapter(self, adapter: Adapter) -> None:
        """See `DeviceRunner.drop_adapter`."""
        self._changes.append(AdapterChange(adapter, is_loaded=False))
        self._runner.drop_adapter(adapter)

    def close(self) -> None:
        """End the ranks and free the memory; the runner cannot be used afterwards."""
        if not self._closing and self._group is not None:
            self._closing = True
            with contextlib.suppress(Exception):  # a rank is gone already
                self._group.broadcast(pickle.dumps(None))
        self._end(GRACE)
        self._runner.close()

    def _watch(self, process: "subprocess.Popen[bytes]", group: Group) -> None:
        code = process.wait()
        if not self._closing:
            log.error("rank process %d of the engine has ended with code %d", process.pid, code)
            group.abort()

    def _end(self, grace: float) -> None:
        """Wait `grace` seconds for the processes to exit, then kill those that are left."""
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
            self._group.abort()
            self._group.close()
        elif self._plans is not None:
            self._plans.close()
        self._group = self._plans = None
        if self._folder is not None:
            self._folder.remove()


def _send_to_ranks(group: Group, step: MTPStep) -> None:
    group.broadcast(pickle.dumps(step))


def _device(first: str, rank: int) -> str:
    """The device of a rank: the CPU, or GPU number (first + rank)."""
    return first if first == "cpu" else f"cuda:{_index(first) + rank}"


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _check_gpus(first: str, size: int, count: int) -> None:
    if _index(first) + size > count:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} GPUs from {first} on, and the machine has {count}: lower it"
        )


def run_rank(launch: RankLaunch, checkpoint: Checkpoint, group: Group) -> None:
    """Run a rank other than rank 0: load its part, and execute plans until an empty one arrives."""
    runner = launch.runner(checkpoint, group)
    adapters = FollowedAdapters(runner)
    group.broadcast(b"")
    if launch.settings.moves_blocks:
        ranked_blocks(runner.blocks, group.collective)
    head = _own_head(launch, checkpoint, runner)
    if head is not None:
        group.broadcast(b"")
    while (step := pickle.loads(group.broadcast(b""))) is not None:
        if isinstance(step, MTPStep):
            assert head is not None
            head.follow(step)
            continue
        assert isinstance(step, RankStep)
        adapters.follow(step.changes, step.forward.adapters)
        runner.follow(step.forward, step.logits_of)
        if launch.settings.moves_blocks:
            group.broadcast(b"")


def _own_head(launch: RankLaunch, checkpoint: Checkpoint, target: DeviceRunner) -> MTPRunner | None:
    """The rank's part of the multi-token prediction head; None if none is used."""
    speculation = launch.settings.speculation
    if speculation is None or not speculation.mtp or speculation.draft is None:
        return None
    return MTPRunner(target, checkpoint, replace(speculation.draft, device=launch.settings.device))


def join_engine(join: RankJoin) -> None:
    """Run a rank of an engine on several nodes: receive a `RankOrder` from rank 0, then follow it.

    Raises:
        ConfigError: this node would not compute exactly as the first one does.
        MissingTorchError: its exchange of columns needs torch.
    """
    require_torch(_SEVERAL_NODES)
    from penstock.runner.rank_network import PlanSink

    plans = PlanSink(join.rendezvous)
    order = pickle.loads(plans.broadcast(b""))
    assert isinstance(order, RankOrder)
    checkpoint = open_checkpoint(join.model, revision=join.revision, hf_overrides=join.hf_overrides, mmproj=join.mmproj)
    launch = order.launch(join, checkpoint)
    from penstock.runner.torch_groups import NetworkGroup

    run_rank(launch, checkpoint, NetworkGroup(join.ranks, join.rendezvous, launch.backend, plans))
