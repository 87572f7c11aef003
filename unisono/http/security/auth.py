"""API keys and roles: users, and operators of the server.

A client sends its key as ``Authorization: Bearer KEY`` (OpenAI's clients) or ``x-api-key: KEY`` (Anthropic's). The
server keeps SHA-256 digests of keys and compares them in constant time. Each key has a name, which logs, metrics and
the queues use in its place.

A server without keys recognises its operators, and readers of stored answers, by addresses and headers (``hosts``).
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono.http.errors import ApiError
from unisono.http.security.hosts import KnownHosts, is_foreign, is_loopback

if TYPE_CHECKING:
    from fastapi import Request

FLAG_NAME = "api-key"
"""Name of the key of ``--api-key``."""
OPERATOR, USER = "operator", "user"
"""Roles of keys."""
IPV6_NETWORK = 64
"""Prefix length of an IPv6 address that identifies a client: the rest is one client's to choose."""


@dataclass(frozen=True)
class ClientLimits:
    """Limits of one client.

    None: no limit.

    concurrent_requests: in progress at once. requests_per_minute: on average; as many may come at once.
    """

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True)
class ApiClient:
    """The owner of requests that take turns and count together: keys of one name, or, without keys, one address.

    label: identifies the client. name: the key's; empty without keys. limits: the key's own, if any. role: OPERATOR,
    USER, or None if the key file does not set one.
    """

    label: str = ""
    name: str = ""
    limits: ClientLimits | None = None
    role: str | None = None


@dataclass(frozen=True)
class ApiKey:
    """An API key. digest: its SHA-256. It is excluded from repr."""

    client: ApiClient
    digest: bytes = field(repr=False)

    @staticmethod
    def named(name: str, digest: bytes, limits: ClientLimits | None = None, role: str | None = None) -> ApiKey:
        """The key with this name, limits and role."""
        return ApiKey(ApiClient(f"key {name}", name, limits, role), digest)


class Keys:
    """The keys that open the server; without any it is open.

    A key is text (an operator's) or a Key.

    hosts: names of the server, which distinguish its own pages from others if there are no keys.
    """

    def __init__(self, keys: Iterable[str | ApiKey] = (), hosts: KnownHosts | None = None) -> None:
        self._keys: tuple[ApiKey, ...] = ()
        self._roles = False  # any key has a role
        self._hosts = hosts or KnownHosts()
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return list(dict.fromkeys(key.client.name for key in self._keys))

    def replace(self, keys: Iterable[str | ApiKey]) -> bool:
        """Replace the keys. Returns True if they changed."""
        before = self._keys
        value = [(key, isinstance(key, str)) for key in keys]
        self._roles = any(not flag and key.client.role is not None for key, flag in value)  # type: ignore[union-attr]
        self._keys = tuple(
            ApiKey.named(FLAG_NAME, digest_of(key), role=OPERATOR) if isinstance(key, str) else key for key, _ in value
        )
        return self._keys != before

    def check(self, request: Request) -> None:
        """Raise ApiError (401) for a request without a valid key. Takes the same time for every wrong key."""
        if self._keys and self._found(request) is None:
            message = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")

    def check_operator(self, request: Request) -> None:
        """Raise ApiError (401, 403) unless the client may operate the server.

        With keys: one with the role operator, or any key if no key has a role. Without: users of this machine, but not
        a web page that they have open; browsers send its origin and the host name that it used for the server.
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
        """Raise ApiError (403) if the server has no keys and the client does not use a known host name.

        For routes that return stored answers: a page can resolve its own name to this server's address (DNS rebinding).
        """
        if not self._keys:
            self._hosts.check(request)

    def operates(self, request: Request) -> bool:
        """True for an operator's key, and for any key if the key file has no roles. False without keys."""
        if not self._keys:
            return False
        found = self._found(request)
        return found is not None and (not self._roles or found.role == OPERATOR)

    def scope(self, request: Request) -> str | None:
        """The name of the key whose requests a client may see and end; None: those of all."""
        return None if not self._keys or self.operates(request) else self.client(request).name

    def client(self, request: Request) -> ApiClient:
        """The client of a request. Without keys, by its address: headers of proxies can be forged."""
        if self._keys:
            return self._found(request) or ApiClient()
        return ApiClient("" if request.client is None else f"address {_network(request.client.host)}")

    def owner(self, request: Request) -> str:
        """An identifier of clients with different keys, without the key. Without keys all are one."""
        return self.client(request).label if self._keys else ""

    def _found(self, request: Request) -> ApiClient | None:
        """The client of a request's key. Every key is compared, wherever the right one is."""
        value, found = digest_of(given_key(request)), None
        for key in self._keys:
            if secrets.compare_digest(value, key.digest):
                found = key.client
        return found


def given_key(request: Request) -> str:
    """The key that a request carries; empty without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def digest_of(key: str) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _network(host: str) -> str:
    """The part of an address that identifies a client."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))
