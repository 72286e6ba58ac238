"""Channels to engines on other machines: ZeroMQ over TCP, encrypted and mutually authenticated.

    server: a DEALER that listens for one engine <──CURVE, one connection──> engine: a DEALER that connects

Each engine has a key of its own, valid for one connection. A broken connection is not resumed, as messages may have
been lost with it. A peer without the key cannot send a message.
"""

import asyncio
import contextlib
import itertools
import socket

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from penstock.config.ranks import Rendezvous
from penstock.engine import protocol
from penstock.engine.protocol import FromEngine, Remote, ToEngine
from penstock.errors import ConfigError
from penstock.fleet.link import LAST_OUTPUTS_MS
from penstock.system.host import bracketed

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""Interval of heartbeats to an engine's machine, and the time it has to answer one."""


class SecureListener:
    """Makes channels on one address of this machine; each admits one engine."""

    def __init__(self, host: str) -> None:
        """
        Args:
            host: the address of this machine that engines connect to.
        """
        self.context = zmq.asyncio.Context()
        self._host = host
        self._server_key, self._server_secret = zmq.curve_keypair()
        self._numbers = itertools.count()
        # It starts before any socket listens: without it every client would be admitted.
        self._authenticator = ThreadAuthenticator(zmq.Context(self.context))
        self._authenticator.start()

    def listen(self) -> "tuple[SecureChannel, Remote]":
        """Make a channel; returns it with the address and keys that its engine needs.

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
        """Stop authenticating. All channels must have been closed."""
        self._authenticator.stop()
        self.context.term()


class SecureChannel:
    """The server's end of one engine's connection."""

    def __init__(self, dealer: "zmq.asyncio.Socket") -> None:
        self._dealer = dealer

    @property
    def is_connected(self) -> bool:
        """Whether the engine is connected, authenticated, and answers heartbeats."""
        # `get`, not `getsockopt`: reading the events consumes the notice of a new message, which only `get` passes on.
        return not self._dealer.closed and bool(int(self._dealer.get(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks; without an engine the message is lost."""
        sent = asyncio.ensure_future(self._dealer.send(protocol.encode(message), zmq.NOBLOCK))
        if sent.done():
            sent.exception()  # there is no engine

    async def receive(self) -> FromEngine:
        """Wait, without a limit, for the engine's next message."""
        while True:
            with contextlib.suppress(zmq.Again):  # the authentication handshake, too, wakes the poll
                frame: bytes = await self._dealer.recv()
                return protocol.decode_from_engine(frame)

    async def receive_rest(self) -> list[FromEngine]:
        """Take the messages that are still queued from an engine that has exited."""
        rest = []
        with contextlib.suppress(zmq.Again):
            while await self._dealer.poll(LAST_OUTPUTS_MS):
                rest.append(protocol.decode_from_engine(await self._dealer.recv(zmq.NOBLOCK)))
        return rest

    def close(self) -> None:
        """Close the sockets and drop queued messages; idempotent."""
        self._dealer.close(linger=0)


def make_rendezvous(host: str, num_nodes: int) -> Rendezvous:
    """Create the addresses on this machine and the keys with which an engine's ranks connect to rank 0.

    Raises:
        OSError: the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as plans, socket.socket(family) as tensors:
        for sock in (plans, tensors):  # frees both ports for the engine, which starts now
            sock.bind((host, 0))
        ports = plans.getsockname()[1], tensors.getsockname()[1]
    keys = (key.decode() for pair in (zmq.curve_keypair(), zmq.curve_keypair()) for key in pair)
    return Rendezvous(host, *ports, num_nodes, *keys)


class _OneConnection:
    """CURVE credentials: admits the holder of a key once."""

    def __init__(self, key: bytes) -> None:
        self._key: bytes | None = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key may connect; it has proved that it holds the secret key."""
        if self._key is None or key != self._key:
            return False
        self._key = None
        return True
