"""API keys: who may use the server, and who may operate it.

A client sends its key as ``Authorization: Bearer KEY`` (OpenAI's clients) or ``x-api-key: KEY`` (Anthropic's). The
server keeps SHA-256 digests of keys and compares them in constant time. Each key has a name, which logs, metrics and
the queues use in its place.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastapi import Request

from unisono.server.errors import ApiError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
FLAG_NAME = "api-key"
"""Name of the key of ``--api-key``."""
IPV6_NETWORK = 64
"""Bits of an IPv6 address that tell clients apart: the rest is one client's to choose."""


@dataclass(frozen=True)
class ClientLimits:
    """What one client may do. None: no limit.

    concurrent_requests: under way at once. requests_per_minute: on average; as many may come at once.
    """

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True)
class Client:
    """Whose requests take turns and count together: those with keys of one name, or, without keys, of one address.

    label: tells clients apart. name: the key's; empty without keys. limits: where the key has its own.
    """

    label: str = ""
    name: str = ""
    limits: ClientLimits | None = None


@dataclass(frozen=True)
class Key:
    """digest: SHA-256 of the key. It is not shown."""

    client: Client
    digest: bytes = field(repr=False)

    @staticmethod
    def named(name: str, digest: bytes, limits: ClientLimits | None = None) -> Key:
        return Key(Client(f"key {name}", name, limits), digest)


class Keys:
    """The keys that open the server. Without any it is open. Keys are given as text, or as Key."""

    def __init__(self, keys: Iterable[str | Key] = ()) -> None:
        self._keys: tuple[Key, ...] = ()
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return list(dict.fromkeys(key.client.name for key in self._keys))

    def replace(self, keys: Iterable[str | Key]) -> None:
        """From now on only these keys open the server."""
        self._keys = tuple(Key.named(FLAG_NAME, digest_of(key)) if isinstance(key, str) else key for key in keys)

    def check(self, request: Request) -> None:
        """Raises ApiError (401) for a request without a valid key. Takes the same time for every wrong key."""
        if self._keys and self._found(request) is None:
            message = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")

    def check_operator(self, request: Request) -> None:
        """Raises ApiError (401, 403) for who may not operate the server: without keys, all but this machine's users.

        A web page that a user of this machine has open is no operator: browsers say where a request comes from.
        """
        if self._keys:
            self.check(request)
            return
        if _is_foreign(request.headers.get("origin")) or not _is_loopback(request):
            message = (
                f"{request.url.path} is for operators: send it from the server's own machine, or start the server "
                "with --api-key and send the key."
            )
            raise ApiError(403, message, "permission_error", code="operators_only")

    def client(self, request: Request) -> Client:
        """Whose request it is. Without keys, its address's: headers of proxies could be anybody's."""
        if self._keys:
            return self._found(request) or Client()
        return Client("" if request.client is None else f"address {_network(request.client.host)}")

    def owner(self, request: Request) -> str:
        """Tells clients with different keys apart, without telling the key. Without keys all are one."""
        return self.client(request).label if self._keys else ""

    def _found(self, request: Request) -> Client | None:
        """The client whose key a request has. Every key is compared, wherever the right one stands."""
        given, found = digest_of(given_key(request)), None
        for key in self._keys:
            if secrets.compare_digest(given, key.digest):
                found = key.client
        return found


def given_key(request: Request) -> str:
    """The key that a request carries; empty without one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def digest_of(key: str) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_foreign(origin: str | None) -> bool:
    """Whether a page of another machine sends the request; ``null`` is any page's that hides where it is from."""
    try:
        return origin is not None and urllib.parse.urlsplit(origin).hostname not in LOCAL_HOSTS
    except ValueError:
        return True


def _network(host: str) -> str:
    """What of an address tells clients apart."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))


def _is_loopback(request: Request) -> bool:
    """Whether the request comes from this machine, and no proxy says that it passes it on for another."""
    if "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        return False
    if request.client is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
