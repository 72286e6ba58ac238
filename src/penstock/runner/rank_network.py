"""Communication between ranks on several nodes: plans over ZeroMQ, layer outputs over torch.distributed.

    rank 0: a ROUTER that listens <──CURVE, a first message── rank k: a DEALER that connects      the fleet's transport,
                                  ──RankOrder, plans───────>                                      within an engine

All ranks of an engine share one CURVE key, made for its start; a peer without it cannot send a message.
"""

import contextlib
import fcntl
import os
import socket
import struct

import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.config.ranks import Rendezvous
from penstock.errors import DeviceLostError
from penstock.system.host import bracketed

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
POLL_MS = 500
_DOMAIN = "ranks"
_SIOCGIFADDR = 0x8915


class PlanSource:
    """Rank 0's socket: the other ranks connect to it and receive their `RankOrder` and plans."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """
        Raises:
            zmq.ZMQError: the address is not this machine's, or its port is in use.
        """
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()  # before the socket listens: without it every peer would be admitted
        self._authenticator.configure_curve_callback(_DOMAIN, _EngineKey(rendezvous.ranks_public))
        self._others: list[bytes] = []
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.curve_server = True
        self._socket.curve_publickey = rendezvous.first_public.encode()
        self._socket.curve_secretkey = rendezvous.first_secret.encode()
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.router_mandatory = True  # sending to a rank that is gone raises an error
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        self._socket.linger = 0
        self._socket.bind(f"tcp://{bracketed(rendezvous.host)}:{rendezvous.plans_port}")

    def await_rank(self) -> bool:
        """Wait a moment for the next rank to connect; False if none did."""
        if not self._socket.poll(POLL_MS):
            return False
        name, _ = self._socket.recv_multipart()
        self._others.append(name)
        return True

    def send(self, index: int, message: bytes) -> None:
        """Send a message to the rank that connected as the `index`-th.

        Raises:
            DeviceLostError: the rank is gone.
        """
        try:
            self._socket.send_multipart([self._others[index], message])
        except zmq.ZMQError as error:
            raise DeviceLostError(f"a rank of the engine is gone: {error}") from error

    def broadcast(self, message: bytes) -> bytes:
        """Send a message to all ranks. Raises as `send`."""
        for index in range(len(self._others)):
            self.send(index, message)
        return message

    def close(self) -> None:
        """Close the socket; ranks that are still connected receive what was sent."""
        self._socket.close(linger=POLL_MS)
        self._authenticator.stop()
        self._context.term()


class PlanSink:
    """The socket of a rank other than rank 0."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.curve_serverkey = rendezvous.first_public.encode()
        self._socket.curve_publickey = rendezvous.ranks_public.encode()
        self._socket.curve_secretkey = rendezvous.ranks_secret.encode()
        self._socket.connect(f"tcp://{bracketed(rendezvous.host)}:{rendezvous.plans_port}")
        self._socket.send(b"here")

    def broadcast(self, message: bytes) -> bytes:
        """Wait, without a limit, for rank 0's next message."""
        said: bytes = self._socket.recv()
        return said

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _EngineKey:
    """CURVE credentials: admits clients that hold the engine's key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key may connect; it has proved that it holds the secret key."""
        return key == self._key


def use_interface_towards(host: str) -> None:
    """Have torch.distributed listen on the interface that reaches rank 0's node, unless the user named one."""
    name = _interface_towards(host)
    if name is not None:
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", name)


def _interface_towards(host: str) -> str | None:
    """The network interface that routes to a host; None if unknown, as for IPv6."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # on a datagram socket this sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == own:
                    return name
    return None
