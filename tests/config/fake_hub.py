"""A hub on this machine: repositories that are directories, and a list of the files that were downloaded."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves ``repositories`` (owner/name -> directory). downloaded: "owner/name/file" of each GET of a file.

    asked: the paths of all requests.
    """

    def __init__(self, repositories: Mapping[str, Path], home: Path) -> None:
        self.repositories, self.home = repositories, home
        self.downloaded: list[str] = []
        self.asked: list[str] = []
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that uses this hub and a cache of its own."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }

    def answer(self, path: str, fetches: bool) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers) of a request."""
        self.asked.append(path)
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
            if (directory := self.repositories.get(repo)) is None:
                return 404, b"", {"X-Error-Code": "RepoNotFound"}
            if rest[:1] == ["revision"] and rest[1:] not in (["main"], [COMMIT]):
                return 404, b"", {"X-Error-Code": "RevisionNotFound"}
            info = self._info(repo, directory)
            if rest[:1] == ["tree"]:
                files = [{"type": "file", "path": each["rfilename"], "oid": "", **each} for each in info["siblings"]]
                return 200, json.dumps(files).encode(), {"Content-Type": "application/json"}
            return 200, json.dumps(info).encode(), {"Content-Type": "application/json"}
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        directory = self.repositories.get(repo)
        if directory is None or not (directory / name).is_file():
            code = "EntryNotFound" if directory else "RepoNotFound"
            return 404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}
        if fetches:
            self.downloaded.append(f"{repo}/{name}")
        content = (directory / name).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}

    @staticmethod
    def _info(repo: str, directory: Path) -> dict[str, Any]:
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        siblings = [
            {"rfilename": file.relative_to(directory).as_posix(), "size": file.stat().st_size} for file in files
        ]
        return {"id": repo, "sha": COMMIT, "siblings": siblings}


@contextmanager
def fake_hub(repositories: Mapping[str, Path], home: Path) -> Iterator[FakeHub]:
    """The hub, while the context lasts."""
    hub = FakeHub(repositories, home)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = hub.answer(self.path, self.command == "GET")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
