"""API keys: who may use the server, and who may operate it.

A client sends its key as ``Authorization: Bearer KEY`` (OpenAI's clients) or ``x-api-key: KEY`` (Anthropic's).
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import urllib.parse
from collections.abc import Iterable

from fastapi import Request

from unisono.server.errors import ApiError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Keys:
    """The keys that open the server, kept as SHA-256 digests. Without any it is open."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, request: Request) -> None:
        """Raises ApiError (401) for a request without a valid key. Takes the same time for every wrong key."""
        if self._digests and not self._opens(given_key(request)):
            message = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")

    def check_operator(self, request: Request) -> None:
        """Raises ApiError (401, 403) for who may not operate the server: without keys, all but this machine's users.

        A web page that a user of this machine has open is no operator: browsers say where a request comes from.
        """
        if self._digests:
            self.check(request)
            return
        if _is_foreign(request.headers.get("origin")) or not _is_loopback(request):
            message = (
                f"{request.url.path} is for operators: send it from the server's own machine, or start the server "
                "with --api-key and send the key."
            )
            raise ApiError(403, message, "permission_error", code="operators_only")

    def owner(self, request: Request) -> bytes:
        """Tells clients with different keys apart, without telling the key. Without keys all are one."""
        return _digest(given_key(request)) if self._digests else b""

    def _opens(self, key: str) -> bool:
        given = _digest(key)
        return any([secrets.compare_digest(given, digest) for digest in self._digests])  # a list: no early end


def given_key(request: Request) -> str:
    """The key that a request carries; empty without one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_foreign(origin: str | None) -> bool:
    """Whether a page of another machine sends the request; ``null`` is any page's that hides where it is from."""
    try:
        return origin is not None and urllib.parse.urlsplit(origin).hostname not in LOCAL_HOSTS
    except ValueError:
        return True


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
