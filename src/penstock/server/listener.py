"""The socket that the server listens on: of a host and port, or a Unix socket (`--uds`).

A Unix socket is a file. While a server uses PATH it holds a lock on PATH.lock, so that a second one is refused also
before the first accepts connections, and the file of a server that was killed is known to be abandoned.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import ConfigError
from penstock.server.config import ServerConfig
from penstock.system.host import bracketed

SEND_BUFFER = 256 * 1024
SOCKET_MODE = 0o660
"""Who may connect to a Unix socket: the server's user and group."""


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """Bind the socket. Called before the model is loaded, so that an unusable address is reported at once.

    Raises:
        ConfigError: the address cannot be used, or another program uses it.
    """
    if config.uds is None:
        with _bind(config.host, config.port) as listener:
            yield listener
        return
    path = Path(os.path.abspath(os.path.expanduser(config.uds)))
    with _locked(path):
        with _bind_unix(path) as listener:
            created = path.lstat().st_ino
            try:
                yield listener
            finally:
                with contextlib.suppress(OSError):
                    if path.lstat().st_ino == created:  # another program may have replaced it
                        path.unlink()


def address_of(listener: socket.socket, *, tls: bool) -> str:
    """Format the address for people: http://127.0.0.1:8000, or unix:/run/penstock.sock."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{bracketed(host)}:{port}"


def is_open_to_others(listener: socket.socket) -> bool:
    """Whether other machines can connect."""
    if listener.family == socket.AF_UNIX:
        return False
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return not (mapped or address).is_loopback


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Because its protocol is given, asyncio sets TCP_NODELAY on each connection; else a token may wait 40 ms for an
    # ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _limit_send_buffer(listener)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Bind a Unix socket; the path must be locked."""
    _remove_abandoned(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _limit_send_buffer(listener)
    try:
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)  # whatever the umask; it does not listen yet
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on the Unix socket {path}: {error.strerror or error}") from None
    return listener


def _limit_send_buffer(listener: socket.socket) -> None:
    # At the kernel's automatic size, the buffers of a thousand slow readers would take gigabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context in which no other server uses the path."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = _lock(lock_path)
    except BlockingIOError:
        raise ConfigError(f"another server uses the Unix socket {path}: stop it, or name another path") from None
    except OSError as error:
        raise ConfigError(f"cannot listen on the Unix socket {path}: {lock_path}: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock_path.unlink()
        os.close(lock)


def _lock(path: Path) -> int:
    """A descriptor of the locked file.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it cannot be opened.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:
            pass  # its holder has just removed it
        except OSError:
            os.close(lock)
            raise
        os.close(lock)


def _remove_abandoned(path: Path) -> None:
    """Remove the socket's file if no process listens on it."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return  # there is none, or binding says what is wrong
    if not is_socket:
        raise ConfigError(f"{path} exists and is not a socket: remove it, or name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return
            if error.errno not in (errno.EAGAIN, errno.EACCES) and not isinstance(error, TimeoutError):
                raise ConfigError(f"the Unix socket {path} cannot be used: {error.strerror or error}") from None
    raise ConfigError(f"another program uses the Unix socket {path}: stop it, or name another path")
