"""Keys: several, hashed, in a file, compared in constant time, with names; no secret is ever shown."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.http.conftest import PLAIN, Server, Start, serving, until
from unisono.http.errors import ApiError
from unisono.http.security.auth import Keys, digest_of
from unisono.http.security.key_file import read_keys
from unisono.types import ConfigError

TEXT = "/v1/completions"
BODY = {"prompt": [5, 6], "max_tokens": 2}


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def ask(server: Server, key: str | None, path: str = TEXT, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json={**BODY, **body}, headers=headers, timeout=30)


def metric(server: Server, start: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_keys_of_a_file(start: Start, tmp_path: Path) -> None:
    """Several keys open the server, one of them by the flag; logs and metrics have names, nothing has a key."""
    keys = {"alice": "k-alice-1", "bob": "k-bob-2", "api-key": "k-flag-3"}
    lines = [f"{name} {digest(key)}" for name, key in keys.items() if name != "api-key"]
    file = written(tmp_path / "keys", "# a comment", "", *lines, f"bob {digest('k-bob-new')}")
    server = start(api_key="k-flag-3", api_key_file=str(file))
    for key in (*keys.values(), "k-bob-new"):
        assert ask(server, key).status_code == 200
        assert ask(server, key, prompt=[]).status_code == 400
    for wrong in (None, "k-alice", "alice", digest("k-alice-1"), digest("k-alice-1")[7:], "api-key"):
        assert ask(server, wrong).status_code == 401
    assert raw_key(server) == 401
    info = server.http.get("/server_info", headers={"x-api-key": "k-bob-2"}).text
    assert '"keys":["api-key","alice","bob"]' in info
    prefix = "unisono:requests_by_key_total"
    assert metric(server, prefix + '{engine="0",key="bob"') == 5
    assert metric(server, 'unisono:requests_refused_total{engine="0",key="",model_name="fake",reason="invalid') == 7
    log = server.log.read_text()
    assert log.count("key bob]") == 2
    assert log.count("401 invalid_api_key") == 7
    told = log + info + server.http.get("/metrics").text + server.http.get("/openapi.json").text
    for key in (*keys.values(), "k-bob-new"):
        assert key not in told
        assert hashlib.sha256(key.encode()).hexdigest() not in told
    assert "Traceback" not in log


def raw_key(server: Server) -> int:
    headers = [(b"authorization", "Bearer é".encode()), (b"content-type", b"application/json")]
    return httpx.post(server.url + TEXT, content=b"{}", headers=headers).status_code


def test_the_file_is_read_again(start: Start, tmp_path: Path) -> None:
    file = written(tmp_path / "keys", f"alice {digest('one')}")
    server = start(api_key_file=str(file))
    assert [ask(server, key).status_code for key in ("one", "two")] == [200, 401]
    written(file, f"alice {digest('two')}")
    until(lambda: ask(server, "two").status_code == 200)
    assert ask(server, "one").status_code == 401
    written(file, "alice two")
    until(lambda: "The keys stay what they were" in server.log.read_text())
    assert ask(server, "two").status_code == 200
    assert "alice two" not in server.log.read_text()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["alice hunter2-the-secret"], "line 1: it must be NAME sha256:DIGEST"),
        (["", "hunter2-the-secret"], "line 2: it must be"),
        (["al/ice " + digest("x")], "line 1: it must be"),
        (["alice sha256:12"], "line 1: it must be"),
        (
            ["alice " + digest("x") + " rpm=4"],
            "the digest may be followed by concurrent_requests=N",
        ),
        (["alice " + digest("x") + " concurrent_requests=0"], "from 1 on"),
        (["alice " + digest("x") + " hunter2-the-secret"], "line 1: the digest may be followed by"),
        (["alice " + digest("x"), "alice " + digest("y") + " concurrent_requests=3"], "line 2: the limits of alice"),
        (["api-key " + digest("x")], "that of --api-key"),
        (["# nothing"], "has no key, so nobody"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_keys(written(tmp_path / "keys", *lines))
    assert says in str(raised.value)
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_keys(tmp_path / "nope")


def test_a_wrong_file_ends_the_start(start: Start, tmp_path: Path) -> None:
    server = start(ready=False, api_key_file=str(written(tmp_path / "keys", "alice hunter2-the-secret")))
    assert server.wait(60) == 1
    assert "line 1: it must be NAME sha256:DIGEST" in server.log.read_text()
    assert "hunter2" not in server.log.read_text()


def test_comparison_is_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are compared, by compare_digest, and all of them wherever the right one stands."""
    keys = Keys([f"key{i}" for i in range(10)])
    compared: list[tuple[bytes, bytes]] = []
    real = secrets.compare_digest

    def spy(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(secrets, "compare_digest", spy)
    for key, opens in (("key0", True), ("key9", True), ("key5", True), ("wrong", False), ("", False)):
        compared.clear()
        request: Any = SimpleNamespace(headers={"authorization": f"Bearer {key}"})
        if opens:
            keys.check(request)
        else:
            with pytest.raises(ApiError):
                keys.check(request)
        assert len(compared) == 10
        assert all(one == digest_of(key) for one, _ in compared)
    assert "digest" not in repr(keys._keys[0])


@pytest.mark.parametrize("joined", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_command_line_does_not_show_the_key(joined: bool, tmp_path: Path) -> None:
    """Neither to ``ps``, from the first second on that the flag is read, nor in the log; the engine's neither."""
    secret = "sk-not-to-be-seen"
    given = [f"--api-key={secret}"] if joined else ["--api-key", secret]
    with serving(tmp_path, "tiny", "--max-num-seqs", "1", *PLAIN, *given, fresh=True) as server:
        assert httpx.post(server.url + TEXT, json={"prompt": [5]}).status_code == 401
        assert ask(server, secret, prompt=[5]).status_code == 200
        shown = [path.read_bytes() for path in processes(server.process.pid)]
        assert len(shown) >= 2
        assert any(b"--api-key" in line and b"*****" in line for line in shown)
        assert not any(secret.encode() in line for line in shown)
        assert secret not in server.log.read_text()


def processes(pid: int) -> list[Path]:
    """The command lines of a process and those that it has started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.name))
    found, left = [], [pid]
    while left:
        left += children.get(left[0], [])
        found.append(Path(f"/proc/{left.pop(0)}/cmdline"))
    return found
