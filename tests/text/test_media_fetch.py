"""Pictures from elsewhere: which hosts, addresses and files are reached, and how much is read of them."""

from __future__ import annotations

import ipaddress
import os
import random
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from unisono.media.fetching.addresses import is_public
from unisono.media.fetching.fetch import Fetcher
from unisono.media.fetching.files import read_file
from unisono.media.settings import MediaSettings
from unisono.types import BadRequest, ConfigError

PUBLIC = [
    "8.8.8.8", "93.184.216.34", "1.1.1.1", "168.63.129.15", "192.0.1.1", "192.88.98.255", "198.17.255.255",
    "198.20.0.0", "223.255.255.255", "100.63.255.255", "100.128.0.0", "172.32.0.0", "2606:2800:220:1::1",
    "2a00:1450:4001::200e", "::ffff:8.8.8.8", "64:ff9b::808:808", "2001:4860:4860::8888",
]  # fmt: skip
BLOCKS = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    "::/8", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/32", "2001:2::/48", "2001:10::/28", "2001:20::/28",
    "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip
"""The blocks of IANA's special-purpose registries, and IPv6 ones that were given back."""
METADATA = [
    "169.254.169.254", "169.254.170.2", "169.254.0.23", "169.254.42.42", "100.100.100.200", "192.0.0.192",
    "168.63.129.16", "fd00:ec2::254", "fd20:ce::254", "fd00:42::42",
]  # fmt: skip
"""Metadata services: AWS, ECS, Tencent, Scaleway, Alibaba, Oracle, Azure, and their IPv6 ones."""
PRIVATE = [
    *METADATA, "127.8.9.1", "::1", "::", "fe80::1", "fe80::1%eth0", "8.8.8.8%eth0", "2606:2800:220:1::1%1",
    "::8.8.8.8", "::ffff:0:8.8.8.8", "2002:808:808::1", "2001:0:808:808::1", "not an address", "", "8.8.8", "0x8.8.8.8",
    "08.8.8.8",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_private(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("block", BLOCKS)
def test_special_blocks(block: str) -> None:
    """The first and last address of each, and some between."""
    network = ipaddress.ip_network(block)
    rng = random.Random(block)
    outside = ipaddress.ip_network("::ffff:0:0/96")  # IPv4-mapped ones are judged by what they map
    for index in (0, network.num_addresses - 1, *(rng.randrange(network.num_addresses) for _ in range(50))):
        if network.version == 4 or network[index] not in outside:
            assert not is_public(str(network[index])), network[index]


@pytest.mark.parametrize("address", [*METADATA[:7], "127.0.0.1", "10.0.0.1", "192.168.1.1", "0.0.0.0"])
def test_embedded_addresses(address: str) -> None:
    """An IPv6 address that carries one of IPv4 is as private as that."""
    number = int(ipaddress.IPv4Address(address))
    for before in ("::ffff:0:0", "64:ff9b::", "64:ff9b:1::", "::", "2606:2800::5efe:0:0", "2606:2800::200:5efe:0:0"):
        assert not is_public(str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(before)) | number)))
    assert not is_public(str(ipaddress.IPv6Address(0x2002 << 112 | number << 80)))
    assert not is_public(str(ipaddress.IPv6Address(0x20010000 << 96 | number ^ 0xFFFFFFFF)))
    assert not is_public(str(ipaddress.IPv6Address(0x20010000 << 96 | number << 64)))


class Handler(BaseHTTPRequestHandler):
    """What the tests' host answers, by path."""

    seen: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append({**self.headers, "path": self.path})
        name = self.path.split("?")[0].strip("/").split("/")[0]
        getattr(self, name, self.missing)()

    def missing(self) -> None:
        self.send_error(404)

    def ok(self) -> None:
        self.answer(b"picture")

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def to(self) -> None:
        self.answer(b"", 302, location=self.path.partition("?")[2])

    def loop(self) -> None:
        self.answer(b"", 301, location="/loop")

    def slow(self) -> None:
        time.sleep(40)

    def drip_head(self) -> None:
        self.drip(b"HTTP/1.1 200 OK\r\n" + b"X-A: 1\r\n" * 1000)

    def drip_body(self) -> None:
        self.drip(b"HTTP/1.1 200 OK\r\n\r\n", at_once=True)
        self.drip(b"x" * 4000)

    def drip(self, data: bytes, at_once: bool = False) -> None:
        try:
            for i in range(0, len(data), len(data) if at_once else 1):
                self.wfile.write(data if at_once else data[i : i + 1])
                self.wfile.flush()
                if not at_once:
                    time.sleep(0.02)
        except OSError:
            pass

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    def claims(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(1 << 40))
        self.end_headers()

    def packed(self) -> None:
        import gzip

        self.answer(gzip.compress(bytes(1 << 24)), content_encoding="gzip")

    def log_message(self, *given: Any) -> None:
        pass


def serving(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    yield from serving()


Resolve = Callable[[str, int], list[str]]


def fetcher(*domains: str, resolve: Resolve = lambda host, port: ["127.0.0.1"], seconds: float = 5.0) -> Fetcher:
    """As a server's, but this machine's loopback address counts as public."""
    return Fetcher(domains, 1 << 16, seconds, resolve, lambda address: address == "127.0.0.1")


def refused(made: Fetcher, url: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        made.fetch(url, "part")
    assert caught.value.param == "part"


@pytest.mark.parametrize("domain", ["pics.test", "*", "*.test"])
def test_a_picture(domain: str, port: int) -> None:
    """From the address that the name had when it was checked; the host is told its own name."""
    asked: list[str] = []

    def resolve(host: str, number: int) -> list[str]:
        asked.append(f"{host}:{number}")
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]  # a name that is bound anew

    assert fetcher(domain, resolve=resolve).fetch(f"http://pics.test:{port}/ok?a=b%20c#d", "part") == b"picture"
    assert asked == [f"pics.test:{port}"]
    seen = Handler.seen[-1]
    assert seen["Host"] == f"pics.test:{port}"
    assert (seen["path"], seen["Accept-Encoding"]) == ("/ok?a=b%20c", "identity")
    assert fetcher("*").fetch(f"http://pics.test:{port}/to?/ok", "part") == b"picture"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.test/a.png", "leads to other.test, which this server does not fetch from: .*pics.test"),
        ("http://pics.test.evil.test/", "leads to pics.test.evil.test"),
        ("http://pics.test@evil.test/", "user name"),
        ("http://evil.test\\@pics.test/", "backslashes"),
        ("http://pics.test/\r\nX: y", "blanks"),
        ("ftp://pics.test/", "only http and https"),
        ("http:///a.png", "only http and https"),
        ("http://[::1/", "cannot be read"),
        ("http://pics.test:99999999/", "cannot be read"),
        ("http://pics.test/" + "a" * 9000, "more than 8192"),
    ],
)
def test_urls_that_are_refused(url: str, words: str) -> None:
    refused(fetcher("pics.test"), url, words)


def test_media_fetching_is_off_by_default() -> None:
    refused(fetcher(), "https://pics.test/", r"--allowed-media-domains has none\. Send a data URL")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001",
     "0177.0.0.1", "0", "[fe80::1%25lo]", "10.1.2.3"],
)  # fmt: skip
def test_private_hosts_are_never_fetched_from(host: str) -> None:
    """Whatever is allowed, and however an address is written: with the true resolver and the true rule."""
    made = Fetcher(("*",), 1 << 16, 5.0)
    refused(made, f"http://{host}:9/a.png", "not public|has no address")


def test_one_private_address_is_enough() -> None:
    made = fetcher("*", resolve=lambda host, port: ["127.0.0.1", "10.0.0.1"])
    refused(made, "http://pics.test/", "leads to pics.test, whose address is not public")
    refused(fetcher("*", resolve=lambda host, port: []), "http://pics.test/", "not public")

    def fails(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    refused(fetcher("*", resolve=fails), "http://pics.test/", "has no address")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://169.254.169.254/latest/meta-data", "169.254.169.254, whose address is not public"),
        ("//10.0.0.1/", "10.0.0.1, whose address is not public"),
        ("http://other.test/", "leads to other.test, which this server does not fetch from"),
        ("file:///etc/passwd", "only http and https"),
        ("data:image/png;base64,AAAA", "only http and https|cannot be fetched"),
    ],
)
def test_redirects_are_checked(target: str, words: str, port: int) -> None:
    domains = ("pics.test", "169.254.169.254", "10.0.0.1")

    def resolve(host: str, number: int) -> list[str]:
        return ["127.0.0.1"] if host == "pics.test" else [host]

    refused(fetcher(*domains, resolve=resolve), f"http://pics.test:{port}/to?{target}", words)


def test_a_loop_of_redirects(port: int) -> None:
    before = len(Handler.seen)
    refused(fetcher("*"), f"http://pics.test:{port}/loop", "redirected more than 5 times")
    assert len(Handler.seen) - before == 6


@pytest.mark.parametrize("path", ["slow", "drip_head", "drip_body"])
def test_hosts_that_take_their_time(path: str, port: int) -> None:
    begun = time.monotonic()
    refused(fetcher("*", seconds=0.4), f"http://pics.test:{port}/{path}", r"not there within 0\.4 s")
    assert time.monotonic() - begun < 30


def test_resolvers_that_take_their_time() -> None:
    found = threading.Event()
    resolved: list[bool] = []

    def resolve(host: str, port: int) -> list[str]:
        resolved.append(found.wait(60))
        return []

    refused(fetcher("*", resolve=resolve, seconds=0.3), "http://pics.test/", "not there")
    assert resolved == [], "nobody waited for it"
    found.set()


@pytest.mark.parametrize(
    ("path", "words"), [("endless", "larger than"), ("claims", "larger than"), ("gone", "answers 404")]
)
def test_oversized_and_failed_downloads_are_refused(path: str, words: str, port: int) -> None:
    refused(fetcher("*"), f"http://pics.test:{port}/{path}", words)
    refused(fetcher("*"), "http://pics.test:1/", "cannot be fetched")


def test_compressed_bodies_are_not_decompressed(port: int) -> None:
    """A packed body stays packed: a bomb is as large as it came."""
    assert len(fetcher("*").fetch(f"http://pics.test:{port}/packed", "part")) < 1 << 16


def test_certificates_are_checked(tmp_path: Path) -> None:
    """Against the name of the URL, although the connection goes to an address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pics.test"]
    command += ["-addext", "subjectAltName=DNS:pics.test", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    for number in serving(tls):
        made = fetcher("*")
        refused(made, f"https://pics.test:{number}/ok", "cannot be fetched from pics.test: .*(?i:certificate)")
        made._tls.load_verify_locations(certificate)
        assert made.fetch(f"https://pics.test:{number}/ok", "part") == b"picture"
        refused(made, f"https://other.test:{number}/ok", "cannot be fetched from other.test: .*(?i:certificate)")


# ---- files ----------------------------------------------------------------------------------------


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"here")
    (tmp_path / "outside.png").write_bytes(b"secret")
    (inside / "good").symlink_to(inside / "a b.png")
    (inside / "bad").symlink_to(tmp_path / "outside.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "fifo")
    return inside


def test_files_inside(allowed: Path) -> None:
    for url in (f"file://{allowed}/a%20b.png", f"file://localhost{allowed}/good", f"file:{allowed}/sub/../a%20b.png"):
        assert read_file(url, allowed, 99, "p") == b"here"
    linked = allowed.parent / "link"
    linked.symlink_to(allowed)
    assert read_file(f"file://{linked}/good", linked, 99, "p") == b"here"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://{0}/../outside.png", "outside of the directory"),
        ("file://{0}/%2e%2e/outside.png", "outside of the directory"),
        ("file://{0}/bad", "outside of the directory"),
        ("file://{0}/up/outside.png", "outside of the directory"),
        ("file:///etc/passwd", "outside of the directory"),
        ("file:///nowhere/at/all", "outside of the directory"),
        ("file://{0}/none.png", "does not exist"),
        ("file://{0}/loop", "outside|does not exist"),
        ("file://{0}/sub", "does not name a regular file"),
        ("file://{0}/fifo", "does not name a regular file"),
        ("file://{0}/a%20b.png%00", "not a file URL"),
        ("file://elsewhere/a.png", "host 'elsewhere'"),
        ("file:relative.png", "not a file URL"),
    ],
)
def test_files_that_are_refused(url: str, words: str, allowed: Path) -> None:
    with pytest.raises(BadRequest, match=words):
        read_file(url.format(allowed), allowed, 99, "p")


def test_files_need_the_flag(allowed: Path) -> None:
    with pytest.raises(BadRequest, match="start it with --allowed-local-media-path"):
        read_file(f"file://{allowed}/good", None, 99, "p")
    with pytest.raises(BadRequest, match="larger than"):
        read_file(f"file://{allowed}/good", allowed, 3, "p")


# ---- flags ----------------------------------------------------------------------------------------


def test_settings() -> None:
    made = MediaSettings.of(
        limit_mm_per_prompt="image=4,video=1", allowed_media_domains="A.test, b.test", media_timeout=None
    )
    assert made.limit_mm_per_prompt == {"image": 4, "video": 1}
    assert made.allowed_media_domains == ("a.test", "b.test")
    counted = MediaSettings.of(limit_mm_per_prompt={"video": {"count": 2, "num_frames": 8}, "audio": 0})
    assert counted.limit_mm_per_prompt == {"image": 32, "video": 2}
    assert MediaSettings.of(allowed_media_domains='["x.test"]').allowed_media_domains == ("x.test",)


@pytest.mark.parametrize(
    "given",
    [
        {"limit_mm_per_prompt": "{"}, {"limit_mm_per_prompt": '{"image": -1}'}, {"limit_mm_per_prompt": '{"audio": 1}'},
        {"allowed_media_domains": ["http://x.test"]}, {"allowed_local_media_path": "/nowhere/at/all"},
        {"mm_processor_kwargs": "[]"}, {"media_max_mb": 0}, {"media_timeout": 0.0}, {"mm_processor_cache_gb": -1.0},
    ],
)  # fmt: skip
def test_wrong_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(given)).replace("_", "-")):
        MediaSettings.of(**given)
