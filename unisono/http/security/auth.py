"""API keys: who may use the server, and who may operate it.

A client sends its key as ``Authorization: Bearer KEY`` (OpenAI's clients) or ``x-api-key: KEY`` (Anthropic's). The
server keeps SHA-256 digests of keys and compares them in constant time. Each key has a name, which logs, metrics and
the queues use in its place.

A server without keys tells its operators, and who may read stored answers, from web pages by addresses and headers
(``hosts``).
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastapi import Request

from unisono.http.errors import ApiError
from unisono.http.security.hosts import KnownHosts, is_foreign, is_loopback

FLAG_NAME = "api-key"
"""Name of the key of ``--api-key``."""
OPERATOR, USER = "operator", "user"
"""Roles of keys."""
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

    label: tells clients apart. name: the key's; empty without keys. limits: where the key has its own. role: OPERATOR,
    USER, or None where the key file says nothing.
    """

    label: str = ""
    name: str = ""
    limits: ClientLimits | None = None
    role: str | None = None


@dataclass(frozen=True)
class Key:
    """digest: SHA-256 of the key. It is not shown."""

    client: Client
    digest: bytes = field(repr=False)

    @staticmethod
    def named(name: str, digest: bytes, limits: ClientLimits | None = None, role: str | None = None) -> Key:
        """Return the key of a name, with its limits and role."""
        return Key(Client(f"key {name}", name, limits, role), digest)


class Keys:
    """The keys that open the server; without any it is open. A key is text (an operator's) or a Key.

    hosts: names of the server, which tell its own pages from others where there are no keys.
    """

    def __init__(self, keys: Iterable[str | Key] = (), hosts: KnownHosts | None = None) -> None:
        self._keys: tuple[Key, ...] = ()
        self._roles = False  # any key has a role
        self._hosts = hosts or KnownHosts()
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return list(dict.fromkeys(key.client.name for key in self._keys))

    def replace(self, keys: Iterable[str | Key]) -> bool:
        """From now on only these keys open the server. Returns whether they are others than before."""
        before = self._keys
        given = [(key, isinstance(key, str)) for key in keys]
        self._roles = any(not flag and key.client.role is not None for key, flag in given)  # type: ignore[union-attr]
        self._keys = tuple(
            Key.named(FLAG_NAME, digest_of(key), role=OPERATOR) if isinstance(key, str) else key for key, _ in given
        )
        return self._keys != before

    def check(self, request: Request) -> None:
        """Raises ApiError (401) for a request without a valid key. Takes the same time for every wrong key."""
        if self._keys and self._found(request) is None:
            message = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")

    def check_operator(self, request: Request) -> None:
        """Raise ApiError (401, 403) unless the client may operate the server.

        With keys: one whose role is operator, or any key where no key has a role. Without: users of this machine, but
        not a web page that they have open; browsers tell its origin and the host name that it knows the server by.
        """
        if self._keys:
            self.check(request)
            if not self.operates(request):
                message = (
                    f"{request.url.path} is for operators, and this key is a user's; use a key whose line in "
                    "--api-key-file has role=operator."
                )
                raise ApiError(403, message, "permission_error", code="operators_only")
            return
        self._hosts.check(request)
        if is_foreign(request.headers.get("origin")) or not is_loopback(request):
            message = (
                f"{request.url.path} is for operators: send it from the server's own machine, or start the server "
                "with --api-key and send the key."
            )
            raise ApiError(403, message, "permission_error", code="operators_only")

    def check_reader(self, request: Request) -> None:
        """Raise ApiError (403) where the server has no keys and the client does not name it by a known host.

        For routes that tell stored answers: a page can have its own name mean this server's address (DNS rebinding).
        """
        if not self._keys:
            self._hosts.check(request)

    def operates(self, request: Request) -> bool:
        """True for an operator's key, and for any key where the key file has no roles. False without keys."""
        if not self._keys:
            return False
        found = self._found(request)
        return found is not None and (not self._roles or found.role == OPERATOR)

    def scope(self, request: Request) -> str | None:
        """Return the name of the key whose requests a client may see and end; None: those of all."""
        return None if not self._keys or self.operates(request) else self.client(request).name

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
