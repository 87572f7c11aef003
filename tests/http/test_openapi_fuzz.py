"""Whatever is sent to any route of /openapi.json, nothing answers 500, and nothing later than its limit.

The requests are the suite's own (``openapi_fuzz``). Where schemathesis is installed, it makes some too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.http.conftest import Server, servers
from tests.http.openapi_fuzz import Maker, Sent

LIMIT = 60.0
"""Seconds that an answer may take on a busy machine. One that never comes is what this looks for."""
ANSWERS = {200, 204, 400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 503}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        options = {"enable_prompt_embeds": True, "enable_return_hidden_states": True, "max_model_len": 128}
        yield start(model_dir, profile_dir=str(tmp_path_factory.mktemp("profile")), **options)


def send(http: httpx.Client, sent: Sent) -> tuple[int, bytes]:
    headers = {} if sent.body is None else {"content-type": sent.content_type}
    answer = http.request(sent.method.upper(), sent.path, content=sent.body, headers=headers, timeout=LIMIT * 2)
    return answer.status_code, answer.content


def assert_survives(server: Server, count: int, seed: int) -> Counter[tuple[str, int]]:
    """Send that many requests. Returns how often each route gave each status."""
    seen: Counter[tuple[str, int]] = Counter()
    maker = Maker(server.http.get("/openapi.json").json(), seed)
    with httpx.Client(base_url=server.url) as http:
        for sent in maker.requests(count):
            before = time.monotonic()
            status, content = send(http, sent)
            taken = time.monotonic() - before
            what = f"{status} after {taken:.1f} s: {sent.method} {sent.path} {(sent.body or b'')[:1500]!r}"
            assert status in ANSWERS, f"{what}\n{content[:500]!r}"
            assert status != 503 or b"engine_dead" not in content, what
            assert taken < LIMIT, what
            if status >= 400 and sent.method != "head":
                error = json.loads(content)["error"]
                assert error["message"], what
                assert "internal_error" not in str(error.get("code")), what
            seen[sent.path.partition("?")[0], status] += 1
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in server.log.read_text()
    assert server.http.get("/load").json()["server_load"] == 0
    return seen


def test_a_short_fuzz_of_all_routes(fuzzed: Server) -> None:
    seen = assert_survives(fuzzed, 550, seed=2)
    answered = {path for path, status in seen if status == 200}
    assert answered >= {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate", "/tokenize", "/health"}
    refused = sum(count for (_, status), count in seen.items() if status == 400)
    assert refused > 100


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 9))
def test_a_long_fuzz_of_all_routes(fuzzed: Server, seed: int) -> None:
    """10,500 requests."""
    assert_survives(fuzzed, 1500, seed)


@pytest.mark.full
def test_schemathesis(fuzzed: Server) -> None:
    """As a developer of a client would run it, against the real thing."""
    pytest.importorskip("schemathesis")
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{fuzzed.url}/openapi.json",
        "--exclude-path",
        "/sleep",
    ]
    command += ["-c", "not_a_server_error", "-n", "100", "--max-response-time", str(LIMIT), "--no-color", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
