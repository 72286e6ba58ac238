"""Messages between the server process and the engine process: msgpack over ZeroMQ.

    server ──Add, Finish, HandOver, Expire, Ping, Shutdown──> engine
    server <──Ready, StepOutputs, HandedOver, Pong──── engine
           <──Failed, in the mapped file──

The first answer is `Ready`; an engine that fails leaves `Failed` in the file that both map, where it can be read as
soon as the process has ended (`penstock.engine.in_flight`). All outputs of one step travel in one message. Between one
server and one engine order is kept both ways, so an output never arrives for a request that was not added before.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config import EngineConfig
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.host import ANYWHERE, Seat
from penstock.request import BlockSource, FinishReason, Request, Resumed, SequenceOutput


def in_flight_file(folder: str) -> Path:
    """The in-flight file in an engine's private folder."""
    return Path(folder, "in_flight")


def local_address(folder: str, name: str) -> str:
    """The address of a socket in an engine's private folder."""
    return f"ipc://{folder}/{name}"


class Remote(msgspec.Struct, frozen=True):
    """Where an engine finds its server over a network, and how each proves to be the other: CURVE keys, as Z85."""

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
    """Private, for local sockets and the in-flight file; removed once they are open at both ends."""
    seat: Seat = ANYWHERE
    remote: Remote | None = None
    """For an engine whose server is on another machine; one connection carries both ways."""

    @property
    def requests(self) -> str:
        """Address from which the engine of a local server takes messages."""
        return local_address(self.folder, "requests")

    @property
    def outputs(self) -> str:
        """Address to which it sends them."""
        return local_address(self.folder, "outputs")

    @property
    def in_flight(self) -> Path:
        """File with the step that the engine computes right now."""
        return in_flight_file(self.folder)


class Add(msgspec.Struct, frozen=True, tag=True):
    """Start a request, or resume one from a dead engine."""

    request: Request
    resumed: Resumed = ()
    source: BlockSource | None = None
    """Where blocks of its text are that another engine has computed."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one of its sequences, now; whatever state it is in, also one already over."""

    request_id: str
    index: int | None
    """Which of its sequences; None: all."""
    reason: FinishReason


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Give a request up: it goes on in another engine. Answered by `HandedOver`; it gets no other output any more."""

    request_id: str


class Expire(msgspec.Struct, frozen=True, tag=True):
    """End a request, as waited for too long, if it has not run yet."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer with a `Pong`, between two steps."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit after the step that runs now, whatever is unfinished."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; steps can be made."""

    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """One step's output of each sequence, the engine's counters after it, and its trace."""

    outputs: list[SequenceOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None if nothing was computed."""


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """A request can go on elsewhere."""

    request_id: str
    source: BlockSource | None
    """Where the blocks of its text are; None: they are to be computed."""
    stats: EngineStats


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The loop is alive."""

    stats: EngineStats


class Failed(msgspec.Struct, frozen=True):
    """The engine's last words: it exits after them."""

    message: str
    mistake: bool
    """Whether options or checkpoint are at fault, so that the message suffices without a traceback."""


ToEngine = Add | Finish | HandOver | Expire | Ping | Shutdown
FromEngine = Ready | StepOutputs | HandedOver | Pong

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
decode_failed = msgspec.msgpack.Decoder(Failed).decode
encode_launch = msgspec.json.Encoder().encode
decode_launch = msgspec.json.Decoder(Launch).decode
