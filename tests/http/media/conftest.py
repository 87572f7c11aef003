"""Servers of models that see, and where their pictures come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.http import pictures_ as pics
from tests.http.conftest import Server, servers
from tests.http.media.requests_ import CAT, CONTEXT, ask, digests
from tests.http.pictures_ import data_url, part


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pics.write_checkpoint(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "cat.png").write_bytes(pics.encoded(CAT))
    (path.parent / "secret.png").write_bytes(pics.encoded(CAT))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    return path


@pytest.fixture(scope="package")
def host() -> Iterator[str]:
    """A host with the cat; /slow takes 2 s."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/slow":
                time.sleep(2)
            if self.path == "/private":
                self.send_response(302)
                self.send_header("location", "http://169.254.169.254/latest")
            else:
                self.send_response(200)
            self.end_headers()
            self.wfile.write(pics.encoded(CAT))

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")
def sees(directory: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that sees, which fetches from this machine."""
    media = {
        "allowed_local_media_path": str(files),
        "allowed_media_domains": ["127.0.0.1", "169.254.169.254"],
        "limit_mm_per_prompt": {"image": 3, "video": 1},
        "media_max_mb": 2,
        "mm_processor_kwargs": {"max_pixels": 200_000},
    }
    with servers(tmp_path_factory) as start:
        options = {"vision": pics.vision(), "max_model_len": CONTEXT, "media": media, "fetches_loopback": True}
        yield start(directory, step_seconds=0.001, **options)


@pytest.fixture(scope="package")
def strict(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with the flags' defaults."""
    with servers(tmp_path_factory) as start:
        media = {"allowed_media_domains": ["*"], "media_timeout": 2.0}
        yield start(directory, vision=pics.vision(), max_model_len=CONTEXT, media=media)


@pytest.fixture(scope="package")
def cat(sees: Server) -> str:
    """The digest of the cat."""
    assert ask(sees, part(data_url(CAT))).status_code == 200
    return digests(sees)[0]
