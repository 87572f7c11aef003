"""Origin of a request: this machine, a web page, and the host name that it used for the server.

A web page whose name is rebound to this server's address (DNS rebinding) reads answers as its own, and its requests
have no Origin. Only their Host header, the page's name, reveals it. Addresses cannot be rebound, so a Host that is one
is known.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from unisono.http.errors import ApiError, show
from unisono.types import ConfigError

if TYPE_CHECKING:
    from fastapi import Request

FLAG = "--allowed-hosts"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class KnownHosts:
    """Host names of a server: localhost, IP addresses, this machine's name, ``bound`` and ``allowed``.

    bound: value of --host. allowed: further names; ``*.example.com`` matches all below, ``*`` every name. Raises
    ConfigError.
    """

    def __init__(self, allowed: Iterable[str] = (), bound: str = "") -> None:
        self._names = {"localhost", bound.lower(), socket.gethostname().lower()} - {""}
        self._ends: tuple[str, ...] = (".localhost",)
        self._all = False
        for one in (name.strip().lower() for name in allowed):
            host = _host(one)
            if one == "*":
                self._all = True
            elif one.startswith("*.") and "*" not in one[2:] and len(one) > 2:
                self._ends += (one[1:],)
            elif not one or "*" in one or "/" in one or host != one:
                raise ConfigError(f"{FLAG} {one!r}: give host names without scheme and port, *.example.com, or *.")
            else:
                self._names.add(one)

    def __contains__(self, header: str) -> bool:
        """True if the value of a Host header is one of these names."""
        host = _host(header)
        if self._all or host in self._names or host.endswith(self._ends):
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def check(self, request: Request) -> None:
        """Raise ApiError (403) for another host name. Clients without a Host header are no browsers."""
        header = request.headers.get("host")
        if header is None or header in self:
            return
        message = (
            f"{request.url.path} is not served under the host name {show(header)}; start the server with "
            f"{FLAG} NAME if that is its name, or with --api-key and send the key."
        )
        raise ApiError(403, message, "permission_error", code="unknown_host")


def _host(header: str) -> str:
    """The host of a Host header without the port, in lower case and without brackets and a final dot."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and ":" not in host:
        text = host
    return text.rstrip(".")


def is_foreign(origin: str | None) -> bool:
    """True for a web page of another machine. ``null`` is the origin of any page that hides its own."""
    if origin is None:
        return False
    try:
        parts = urllib.parse.urlsplit(origin)
        return parts.hostname not in LOCAL_HOSTS or parts.port == 0
    except ValueError:  # a port that is no number, as in http://localhost:80.example.com
        return True


def is_loopback(request: Request) -> bool:
    """True if the request comes from this machine, without a proxy's header for another client."""
    if "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        return False
    if request.client is None:  # a Unix socket
        return True
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
