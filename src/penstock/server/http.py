"""uvicorn, run as a part of this program rather than as its owner."""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI


class HttpServer(uvicorn.Server):
    """Leaves signals alone (uvicorn would raise them again at its end, and the exit code would be theirs).

    `announce` is called once it listens; `closing_seconds` is how long connections may take to close at the end.
    """

    def __init__(self, app: FastAPI, announce: Callable[[], None], closing_seconds: int) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and stop are told by us
        super().__init__(
            uvicorn.Config(
                app, lifespan="off", log_config=None, timeout_graceful_shutdown=closing_seconds, server_header=False
            )
        )
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()
