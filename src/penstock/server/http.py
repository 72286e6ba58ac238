"""Runs uvicorn as a component, without its signal handling."""

import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from penstock.server.config import ServerConfig
from penstock.server.connection import protocol_within
from penstock.server.errors import ErrorReply


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers (uvicorn re-raises signals at its end, which would set the exit code).

    `announce` is called once it listens; `closing_seconds` limits the time for closing connections at the end.
    """

    def __init__(self, app: FastAPI, announce: Callable[[], None], closing_seconds: int, config: ServerConfig) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # this server logs start, stop and refusals itself

        def count_refusal(reply: ErrorReply) -> None:
            app.state.engine.record_failure(reply.reason)

        settings = uvicorn.Config(
            app,
            http=protocol_within(config.call_limits, count_refusal, config.prefix),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=config.call_limits.keep_alive_timeout,
            timeout_graceful_shutdown=closing_seconds,
            server_header=False,
            # Who may open the Unix socket is trusted like a proxy on 127.0.0.1: it names the client and the scheme.
            forwarded_allow_ips=None if config.uds is None else "*",
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            ssl_ca_certs=config.tls_client_ca,
            ssl_cert_reqs=ssl.CERT_NONE if config.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        super().__init__(settings)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        """Close the remaining connections at once, whatever their clients have not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()
