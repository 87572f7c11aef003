"""Raw connections to a server, and its memory."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from tests.http.conftest import Server


def connect(server: Server, source: str = "127.0.0.1") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60, source_address=(source, 0))


def answer(connection: socket.socket) -> bytes:
    """All that comes till the server closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


def resident(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096
