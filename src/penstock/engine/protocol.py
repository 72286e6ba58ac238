"""Messages between the server process and the engine process: msgpack over ZeroMQ.

    server ──Add, Finish, HandOver, Expire, Ping, Shutdown──> engine
    server <──Loading, Ready, StepOutputs, HandedOver, Pong──── engine
           <──Failed, in the mapped file──

The first message after any `Loading` is `Ready`; an engine that fails leaves `Failed` in the mapped file, readable as
soon as the process has ended (`penstock.engine.in_flight`). All outputs of one step are one message. Between one server
and one engine the order is preserved in both directions, so an output never arrives for a request that was not added
before.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.api.request import BlockSource, FinishReason, Request, Resumed, SequenceOutput
from penstock.config.engine_config import EngineConfig
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.system.host import UNBOUND, CpuBinding


def in_flight_file(folder: str) -> Path:
    """The in-flight file in an engine's private folder."""
    return Path(folder, "in_flight")


def local_address(folder: str, name: str) -> str:
    """The address of a socket in an engine's private folder."""
    return f"ipc://{folder}/{name}"


class Remote(msgspec.Struct, frozen=True):
    """Address of the engine's server on a network, and the CURVE keys (Z85) with which both authenticate."""

    address: str
    server_key: str
    public_key: str
    secret_key: str


class Launch(msgspec.Struct, frozen=True):
    """Launch options that a new engine process reads, as one line of JSON, from its standard input."""

    config: EngineConfig
    core: str
    """`module:function` that builds the engine core to run."""
    folder: str
    """Private folder of local sockets and the in-flight file; removed once they are open at both ends."""
    binding: CpuBinding = UNBOUND
    remote: Remote | None = None
    """Set if the server is on another machine; one connection then carries both directions."""

    @property
    def requests(self) -> str:
        """Address at which a local engine receives messages."""
        return local_address(self.folder, "requests")

    @property
    def outputs(self) -> str:
        """Address to which it sends outputs."""
        return local_address(self.folder, "outputs")

    @property
    def in_flight(self) -> Path:
        """File with the engine's current step."""
        return in_flight_file(self.folder)


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add a request, or resume one of a dead engine."""

    request: Request
    resumed: Resumed = ()
    source: BlockSource | None = None
    """Location of KV blocks of its text that another engine has computed."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one of its sequences, now, in any state; ended ones are ignored."""

    request_id: str
    index: int | None
    """Index of the sequence; None: all."""
    reason: FinishReason


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Remove a request, which continues on another engine. Answered by `HandedOver`; no other output follows."""

    request_id: str


class Expire(msgspec.Struct, frozen=True, tag=True):
    """End a request that has not run yet, because it has waited too long."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Request a `Pong`, between two steps."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit after the current step, with or without unfinished requests."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the weights that a starting engine has read, and bytes in all."""

    num_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and steps can run."""

    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of all sequences in a step, the engine's counters after it, and its trace."""

    outputs: list[SequenceOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None if nothing was computed."""


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """A request can continue on another engine."""

    request_id: str
    source: BlockSource | None
    """Location of its text's KV blocks; None: they must be recomputed."""
    stats: EngineStats


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The loop is responsive."""

    stats: EngineStats


class Failed(msgspec.Struct, frozen=True):
    """The engine's last message before it exits."""

    message: str
    mistake: bool
    """Whether options or checkpoint are invalid, so that the message suffices without a traceback."""


ToEngine = Add | Finish | HandOver | Expire | Ping | Shutdown
FromEngine = Loading | Ready | StepOutputs | HandedOver | Pong

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
decode_failed = msgspec.msgpack.Decoder(Failed).decode
encode_launch = msgspec.json.Encoder().encode
decode_launch = msgspec.json.Decoder(Launch).decode
