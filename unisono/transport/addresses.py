"""Addresses of engines that listen for others: ``tcp://HOST:PORT`` or, on one host, ``unix:///PATH``."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from unisono.types import ConfigError


@dataclass(frozen=True)
class Address:
    """An address. scheme: tcp; or unix, which carries payloads through shared memory. host, port: of tcp. path: of
    unix.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @staticmethod
    def parse(text: str, flag: str) -> Address:
        """Parse an address. Raises ConfigError naming the flag."""
        scheme, separator, rest = text.strip().partition("://")
        if not separator:
            scheme, rest = "tcp", text.strip()
        if scheme == "nixl":
            raise ConfigError(
                f"{flag} {text}: engines meet over TCP, also where NIXL carries the pages; give tcp://HOST:PORT, and "
                "--transfer-backend nixl."
            )
        if scheme == "unix" and rest.startswith("/"):
            return Address("unix", path=rest)
        host, _, port = rest.rstrip("/").rpartition(":")
        if scheme == "tcp" and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
            return Address("tcp", host.strip("[]"), int(port))
        raise ConfigError(f"{flag} {text}: give tcp://HOST:PORT, or unix:///PATH on one host.")

    @property
    def family(self) -> socket.AddressFamily:
        if self.scheme == "unix":
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def name(self) -> str | tuple[str, int]:
        """Address in the form that sockets take."""
        return self.path if self.scheme == "unix" else (self.host, self.port)

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.scheme == "unix" else f"tcp://{self.host}:{self.port}"
