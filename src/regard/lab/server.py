"""The server of the lab: listens on 127.0.0.1, and nowhere else."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from regard.errors import InputError
from regard.lab.app import make_app
from regard.lab.security import Guard
from regard.lab.state import Lab

ADDRESS = "127.0.0.1"
BACKLOG = 2048  # connections that wait to be accepted


class LabServer:
    """A lab on a port of this machine.

        server = LabServer(Lab(find_downloaded()))
        print(server.address)
        server.run()

    Attributes:
        port: the port it listens on; a free one if none was asked for.
        token: the random word in its address.
    """

    def __init__(self, lab: Lab, port: int = 0) -> None:
        self.lab, self.token = lab, secrets.token_urlsafe(24)
        self.socket = _bind(port)
        self.port = int(self.socket.getsockname()[1])
        app: ASGIApp = Guard(make_app(lab), self.token, [f"{ADDRESS}:{self.port}", f"localhost:{self.port}"])
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=2,
            backlog=BACKLOG,
            http="h11",
            ws="none",
            h11_max_incomplete_event_size=64 << 10,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @property
    def is_running(self) -> bool:
        return self._server.started

    def run(self) -> None:
        """Serve until `stop`, or an interrupt."""
        try:
            self._server.run(sockets=[self.socket])
        finally:
            self.close()

    def close(self) -> None:
        """Give the port and the threads back, of a server that has ended or never ran."""
        self.lab.workers.close()
        self.socket.close()

    def stop(self) -> None:
        self._server.should_exit = True


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((ADDRESS, port))
        bound.listen(BACKLOG)  # so that a browser that is quicker than the server waits for it
    except (OSError, OverflowError) as failure:
        bound.close()
        raise InputError(
            f"Port {port} cannot be used.",
            asked=f"--port {port}",
            found=f"{type(failure).__name__}: {failure}",
            because="another program listens there, or the number is no port",
            instead="no --port: any free one is taken",
        ) from failure
    return bound


def serve(lab: Lab, port: int = 0, announce: Callable[[str], None] = print) -> None:
    """Serve a lab until an interrupt; `announce` is given its address."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = LabServer(lab, port)
    announce(server.address)
    server.run()
