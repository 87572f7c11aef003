"""Flags of HTTP: TLS, idle connections, and access by pages of other origins (CORS). Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.http.security.hosts import KnownHosts
from unisono.types import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


@dataclass(frozen=True)
class HttpSettings:
    """HTTP flags of ``unisono serve``.

    allowed_origins, allowed_methods, allowed_headers: CORS rules for browsers; ("*",): anything. allow_credentials:
    browsers may send cookies. root_path: a proxy's prefix of the paths. ssl_keyfile, ssl_certfile: PEM files; with them
    the server speaks HTTPS only. ssl_ca_certs, ssl_cert_reqs: client certificates, as in Python's ssl module: 0 none, 1
    optional, 2 required. allowed_hosts: host names of the server beside localhost, its --host and IP addresses
    (``hosts.KnownHosts``). timeout_keep_alive: seconds until an idle connection is closed. It has to exceed the time
    after which clients and proxies close theirs (httpx 5, aiohttp 15, most proxies 60), or a request may meet the
    closing connection.

    Raises ConfigError.
    """

    allow_credentials: bool = False
    allowed_headers: tuple[str, ...] = ("*",)
    allowed_hosts: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_origins: tuple[str, ...] = ("*",)
    root_path: str = ""
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    timeout_keep_alive: int = 75

    def __post_init__(self) -> None:
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value is not None and not Path(value).is_file():
                raise ConfigError(f"{flag} {value}: there is no such file.")
            if value is not None and self.ssl_certfile is None:
                raise ConfigError(f"{flag} needs --ssl-certfile, the server's certificate.")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs}: give 0 (none), 1 (optional) or 2 (required).")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs to check certificates with.")
        if self.timeout_keep_alive < 1:
            raise ConfigError(f"--timeout-keep-alive {self.timeout_keep_alive}: give 1 second or more.")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials lets any page act for its visitors: name --allowed-origins.")
        KnownHosts(self.allowed_hosts)

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "http" if self.ssl_certfile is None else "https"

    def with_cors(self, app: ASGIApp) -> ASGIApp:
        """The application with the CORS headers of the flags."""
        if not self.allowed_origins:
            return app
        from starlette.middleware.cors import CORSMiddleware

        return CORSMiddleware(
            app,
            allow_origins=self.allowed_origins,
            allow_credentials=self.allow_credentials,
            allow_methods=self.allowed_methods,
            allow_headers=self.allowed_headers,
        )

    def uvicorn(self) -> dict[str, Any]:
        """Arguments of ``uvicorn.Config``."""
        return {
            "root_path": self.root_path,
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_certfile": self.ssl_certfile,
            "ssl_ca_certs": self.ssl_ca_certs,
            "ssl_cert_reqs": self.ssl_cert_reqs,
            "timeout_keep_alive": self.timeout_keep_alive,
        }
