"""uvicorn, run as a part of this program rather than as its owner."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from penstock.errors import ConfigError
from penstock.server.config import ServerConfig
from penstock.server.limits import GateLimits

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:  # httptools' where that is installed
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

logger = logging.getLogger("penstock.server")


def protocol_within(limits: GateLimits) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, and an end for connections that begin nothing, or of whose answer nothing is read."""

    class TimedProtocol(HttpProtocol):
        """The timers: `head` runs until a call begins, `stall` while the client does not take what is written."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head: asyncio.TimerHandle | None = None
            self._stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head = self.loop.call_later(limits.body_timeout, self._end_if_nothing_came)

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._stall):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall = self.loop.call_later(limits.write_timeout, self._end_stalled)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stall is not None:
                self._stall.cancel()

        def _end_if_nothing_came(self) -> None:
            if self.cycle is None:
                self.transport.abort()

        def _end_stalled(self) -> None:
            logger.warning("a client read nothing of its answer for %g s: its connection is cut", limits.write_timeout)
            self.transport.abort()  # closing would wait for what is buffered to be read

    return TimedProtocol


class HttpServer(uvicorn.Server):
    """Leaves signals alone (uvicorn would raise them again at its end, and the exit code would be theirs).

    `announce` is called once it listens; `closing_seconds` is how long connections may take to close at the end.
    """

    def __init__(self, app: FastAPI, announce: Callable[[], None], closing_seconds: int, config: ServerConfig) -> None:
        """
        Raises:
            ConfigError: the files for TLS cannot be used.
        """
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and stop are told by us
        settings = uvicorn.Config(
            app,
            http=protocol_within(config.gate),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=config.gate.keep_alive_timeout,
            timeout_graceful_shutdown=closing_seconds,
            server_header=False,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            ssl_ca_certs=config.tls_client_ca,
            ssl_cert_reqs=ssl.CERT_NONE if config.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        try:
            settings.load()
        except OSError as error:
            raise ConfigError(f"the TLS files cannot be used: {error}") from None
        super().__init__(settings)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        """End those that are left at once, whatever their clients have not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()
