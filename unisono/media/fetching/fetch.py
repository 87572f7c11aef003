"""Images and videos from http(s) URLs of allowed hosts.

A name is resolved once, all of its addresses must be public, and the connection goes to one of these addresses, so DNS
rebinding has no effect. Redirects are followed here, and each is checked like the first URL. Proxies of the environment
are not used. Content encodings are not decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from unisono.media.fetching.addresses import is_public
from unisono.types import BadRequest

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {"User-Agent": "unisono", "Accept": "image/*, video/*;q=0.9, */*;q=0.5", "Accept-Encoding": "identity"}


class _FetchRefused(Exception):
    """The reason why a URL is not fetched, as the end of a sentence that begins with its parameter."""


Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Fetcher:
    """Fetches from the hosts ``domains`` (``MediaSettings.allowed_media_domains``), ``max_bytes`` in ``seconds``.

    resolve: maps host and port to addresses. public: True for an address that may be connected to. Tests replace both.
    """

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        seconds: float,
        resolve: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._domains, self._max_bytes, self._seconds = tuple(domains), max_bytes, seconds
        self._resolve, self._public = resolve, public

    def fetch(self, url: str, param: str) -> bytes:
        """The content of a URL. Call it outside of event loops. Raises BadRequest."""
        try:
            return asyncio.run(self._fetch(url))
        except _FetchRefused as error:
            raise BadRequest(f"{param} {error}", param, "media_not_fetched") from None

    async def _fetch(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url)
        except TimeoutError:
            raise _FetchRefused(
                f"was not there within {self._seconds:g} s (--media-timeout); send it as a data URL."
            ) from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._checked(url)
            address = await self._address(parts)
            answer = await self._get(parts, address)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise _FetchRefused(f"is redirected more than {MAX_REDIRECTS} times; send the last URL.")

    def _checked(self, url: str) -> SplitResult:
        """The parts of a URL with an allowed host."""
        if len(url) > MAX_URL_CHARS or any(c.isspace() or c in "\\" or not c.isprintable() for c in url):
            raise _FetchRefused(
                f"has a URL with blanks, backslashes or more than {MAX_URL_CHARS} characters; encode it."
            )
        try:
            parts = urlsplit(url)
            host, _ = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise _FetchRefused(f"has a URL that cannot be read: {error}.") from None
        if parts.scheme not in ("http", "https") or not host:
            raise _FetchRefused(f"leads to {_short(url)}; only http and https URLs with a host are fetched.")
        if parts.username is not None or parts.password is not None:
            raise _FetchRefused("has a URL with a user name or password; leave them out.")
        if not any(_matches(host.lower(), domain) for domain in self._domains):
            allowed = ", ".join(self._domains) or "none"
            raise _FetchRefused(
                f"leads to {_short(host)}, which this server does not fetch from: --allowed-media-domains has "
                f"{_short(allowed)}. Send a data URL, data:image/png;base64,…"
            )
        return parts

    async def _address(self, parts: SplitResult) -> str:
        """The address to connect to. All addresses of the host must be public."""
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            addresses = await _in_daemon(self._resolve, parts.hostname, port)
        except (OSError, UnicodeError):
            raise _FetchRefused(f"leads to {_short(parts.hostname)}, which has no address.") from None
        private = next((one for one in addresses if not self._public(one)), None)
        if private is not None or not addresses:
            raise _FetchRefused(
                f"leads to {_short(parts.hostname)}, whose address is not public; private, local and reserved "
                "addresses are refused."
            )
        return addresses[0]

    async def _get(self, parts: SplitResult, address: str) -> bytes | str:
        """The body, or the target of a redirect."""
        import httpx  # 0.3 s, with its command line; few engines fetch

        assert parts.hostname is not None
        literal = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        place = literal if parts.port is None else f"{literal}:{parts.port}"
        url = parts._replace(netloc=place, fragment="").geturl()
        headers = {**HEADERS, "Host": parts.netloc}
        extensions = {"sni_hostname": parts.hostname} if parts.scheme == "https" else {}
        options = {"trust_env": False, "follow_redirects": False, "timeout": self._seconds}
        try:
            async with (
                httpx.AsyncClient(verify=self._tls, **options) as client,  # type: ignore[arg-type]
                client.stream("GET", url, headers=headers, extensions=extensions) as answer,
            ):
                return await self._read(answer)
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            if isinstance(error, httpx.TimeoutException):
                raise TimeoutError from None
            raise _FetchRefused(
                f"cannot be fetched from {_short(parts.hostname)}: {_short(str(error) or type(error).__name__)}."
            ) from None

    async def _read(self, answer: httpx.Response) -> bytes | str:
        if answer.status_code in REDIRECTS and (where := answer.headers.get("location")):
            return str(where)
        if answer.status_code != 200:
            raise _FetchRefused(f"cannot be fetched: its host answers {answer.status_code}.")
        length = answer.headers.get("content-length", "")
        body = bytearray()
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        try:
            async for part in answer.aiter_raw():
                body += part
                if len(body) > self._max_bytes:
                    raise self._too_large()
            return bytes(body)
        finally:
            body.clear()  # the traceback of an error holds this frame

    def _too_large(self) -> _FetchRefused:
        return _FetchRefused(f"is larger than {self._max_bytes >> 20} MiB (--media-max-mb); send less.")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        import httpx

        return httpx.create_ssl_context(trust_env=False)


async def _in_daemon(resolve: Resolve, host: str, port: int) -> Sequence[str]:
    """Resolve a name in a daemon thread, so that a slow resolver (minutes) does not outlast the timeout."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Sequence[str]] = loop.create_future()

    def finish(result: Sequence[str], error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result: Sequence[str] = ()
        problem: Exception | None = None
        try:
            result = resolve(host, port)
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=run, daemon=True).start()
    return await done


def _matches(host: str, domain: str) -> bool:
    return domain == "*" or host == domain or (domain.startswith("*.") and host.endswith(domain[1:]))


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"
