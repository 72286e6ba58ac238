"""Channels to engines on other machines: ZeroMQ over TCP, encrypted, between two that each prove to be the other.

    server: a DEALER that listens for one engine <──CURVE, one connection──> engine: a DEALER that connects

An engine's key is made for it, and good for one connection: one that breaks is not taken up again, as words may be lost
with it. Nobody else gets as far as a message.
"""

import asyncio
import contextlib
import itertools
import socket

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from penstock.engine import protocol
from penstock.engine.protocol import FromEngine, Remote, ToEngine
from penstock.errors import ConfigError
from penstock.frontend.link import LAST_OUTPUTS_MS
from penstock.host import bracketed
from penstock.ranks import Meeting

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""How often an engine's machine is asked whether it is there, and how long it may take to say so."""


class SecureListener:
    """Makes channels on one address of this machine; each takes one engine."""

    def __init__(self, host: str) -> None:
        """
        Args:
            host: the address of this machine at which engines reach it.
        """
        self.context = zmq.asyncio.Context()
        self._host = host
        self._server_key, self._server_secret = zmq.curve_keypair()
        self._numbers = itertools.count()
        # It runs before anything listens: without it, any client would be let in.
        self._authenticator = ThreadAuthenticator(zmq.Context(self.context))
        self._authenticator.start()

    def listen(self) -> "tuple[SecureChannel, Remote]":
        """A channel, and the address and keys that its engine needs.

        Raises:
            ConfigError: this machine has no such address.
        """
        public, secret = zmq.curve_keypair()
        domain = str(next(self._numbers))
        self._authenticator.configure_curve_callback(domain, _OneConnection(public))
        dealer: zmq.asyncio.Socket = self.context.socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.curve_server = True
        dealer.curve_publickey, dealer.curve_secretkey = self._server_key, self._server_secret
        dealer.zap_domain = domain.encode()
        dealer.heartbeat_ivl, dealer.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        try:
            port = dealer.bind_to_random_port(f"tcp://{bracketed(self._host)}")
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise ConfigError(
                f"engines cannot reach this server at {self._host}: {error}; set cluster_host to an address of this "
                "machine that the cluster's nodes can connect to"
            ) from None
        address = f"tcp://{bracketed(self._host)}:{port}"
        return SecureChannel(dealer), Remote(address, self._server_key.decode(), public.decode(), secret.decode())

    def close(self) -> None:
        """To be called when all channels are closed."""
        self._authenticator.stop()
        self.context.term()


class SecureChannel:
    """A connection that one engine may make, and what is said over it."""

    def __init__(self, dealer: "zmq.asyncio.Socket") -> None:
        self._dealer = dealer

    @property
    def is_connected(self) -> bool:
        """Whether the engine is connected and authenticated, and answered a short while ago."""
        # `get`, not `getsockopt`: asking takes the one notice that a message has come, and only `get` passes it on.
        return not self._dealer.closed and bool(int(self._dealer.get(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: ToEngine) -> None:
        """Queue a message; it never blocks, and what is sent to no engine is lost."""
        sent = asyncio.ensure_future(self._dealer.send(protocol.encode(message), zmq.NOBLOCK))
        if sent.done():
            sent.exception()  # there is no engine

    async def receive(self) -> FromEngine:
        """The engine's next message, however long that takes."""
        while True:
            with contextlib.suppress(zmq.Again):  # the client's credentials look as if a message were there
                frame: bytes = await self._dealer.recv()
                return protocol.decode_from_engine(frame)

    async def receive_rest(self) -> list[FromEngine]:
        """Messages still queued from an engine that has exited."""
        rest = []
        with contextlib.suppress(zmq.Again):
            while await self._dealer.poll(LAST_OUTPUTS_MS):
                rest.append(protocol.decode_from_engine(await self._dealer.recv(zmq.NOBLOCK)))
        return rest

    def close(self) -> None:
        """Forget what is queued; idempotent."""
        self._dealer.close(linger=0)


def make_meeting(host: str, num_nodes: int) -> Meeting:
    """Where ranks of an engine on several nodes find the first one, on this machine; with keys of their own.

    Raises:
        OSError: this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as plans, socket.socket(family) as tensors:
        for one in (plans, tensors):  # both are free; the engine, which starts now, takes them
            one.bind((host, 0))
        ports = plans.getsockname()[1], tensors.getsockname()[1]
    keys = (key.decode() for pair in (zmq.curve_keypair(), zmq.curve_keypair()) for key in pair)
    return Meeting(host, *ports, num_nodes, *keys)


class _OneConnection:
    """Lets a key's holder in, the first time."""

    def __init__(self, key: bytes) -> None:
        self._key: bytes | None = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this key, who has proved to hold its secret, may connect."""
        if self._key is None or key != self._key:
            return False
        self._key = None
        return True
