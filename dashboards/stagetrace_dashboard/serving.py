"""Serving the application: threads, no banner, no line for every request."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from stagetrace.errors import UsageError

if TYPE_CHECKING:
    from flask import Flask

_PATIENCE_S: Final = 60.0
_LAST_PORT: Final = 65_535


class _Handler(WSGIRequestHandler):
    """Says nothing of what it serves with, and waits for nobody for long."""

    timeout = _PATIENCE_S
    server_version = "stagetrace"
    sys_version = ""

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - as in the base class
        """Log nothing: addresses may hold a token."""


def listen(app: Flask, host: str, port: int) -> BaseWSGIServer:
    """Return a server that listens; ``port`` 0 is any that is free.

    Raises:
        UsageError: The address cannot be had.
    """
    if not 0 <= port <= _LAST_PORT:
        raise UsageError(
            f"there is no port {port}", hint=f"ports are up to {_LAST_PORT}, and 0 is any that is free"
        )
    # Werkzeug ends the process itself when the address is taken, so that is tried before.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason}", hint="choose another --port"
        ) from error
    return make_server(host, port, app, threaded=True, request_handler=_Handler)
