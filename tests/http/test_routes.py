"""Routes beside generation, and what holds for all: HEAD, request ids, one log line and one count for each failure."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.http.conftest import Server
from tests.http.fake_engine import Trick

TEXT = "/v1/completions"


def counted(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/v1/models", "/v1/models/fake", "/metrics"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    if path not in ("/metrics",):
        assert head.headers["content-length"] == str(len(get.content))
    assert server.http.head("/nope").status_code == 404
    assert server.http.head(TEXT).status_code == 405


def test_one_model(server: Server) -> None:
    assert server.openai.models.retrieve("alias").id == "alias"
    missing = server.http.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "some/other" in missing.json()["error"]["message"]


def test_small_answers(server: Server) -> None:
    from unisono import __version__

    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/load").json() == {"server_load": 0}
    assert server.http.post("/ping").status_code == server.http.get("/ping").status_code == 200


FAILURES: list[tuple[Callable[[Server, str], int], int, str, str]] = [
    (lambda s, i: s.http.post(TEXT, json={"prompt": "a", "n": 0}, headers={"x-request-id": i}).status_code,
     400, TEXT, "n=0 is out of range"),
    (lambda s, i: s.http.post(TEXT, json={"prompt": [Trick.FAIL]}, headers={"x-request-id": i}).status_code,
     500, TEXT, "a fake failure"),
    (lambda s, i: 500 if "fake failure" in s.http.post(TEXT, json={"prompt": [Trick.FAIL], "stream": True},
     headers={"x-request-id": i}).text else 0, 500, TEXT, "a fake failure"),
    (lambda s, i: s.http.get("/nope", headers={"x-request-id": i}).status_code, 404, "none", "GET /nope: Not Found"),
    (lambda s, i: s.http.post("/health", headers={"x-request-id": i}).status_code, 405, "/health", "Not Allowed"),
]  # fmt: skip


@pytest.mark.parametrize("case", FAILURES, ids=["400", "500", "stream", "404", "405"])
def test_a_failure_is_counted_and_logged_once_with_its_request_id(
    server: Server, request: pytest.FixtureRequest, case: tuple[Callable[[Server, str], int], int, str, str]
) -> None:
    call, status, handler, says = case
    request_id = f"my-{request.node.callspec.id}"
    name = "unisono:request_errors_total"
    before, there = counted(server, name), len(server.log.read_text())
    assert call(server, request_id) == status
    assert counted(server, name) == before + 1
    pattern = rf'^{name}{{.*handler="{handler}".*status="{status}"}} [1-9]'
    assert re.search(pattern, server.http.get("/metrics").text, re.MULTILINE)
    lines = [line for line in server.log.read_text()[there:].splitlines() if f"[{request_id}]" in line]
    assert len(lines) == 1, lines
    assert says in lines[0]
    assert f" {status} " in lines[0]


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        (
            "POST",
            "/chat/completions",
            "POST /chat/completions: Not Found. Did you mean /v1/chat/completions? GET /docs",
        ),
        ("POST", "/v1/v1/completions", "Did you mean /v1/completions?"),
        ("POST", "/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/tokenize", "Did you mean /tokenize?"),
        ("GET", "/get_server_info", "Did you mean /server_info?"),
        ("POST", "/v1/audio/speech", "Not Found. It is not supported: audio is not supported."),
        ("GET", "/v1/files", "It is not supported: there are no files"),
        ("GET", "/nothing/like/this", "Not Found. GET /docs lists the routes."),
        ("GET", "/v1/completions", "GET /v1/completions: Method Not Allowed. Use POST."),
    ],
)
def test_unknown_paths_and_methods_name_a_route(server: Server, method: str, path: str, says: str) -> None:
    answer = server.http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code in (404, 405)
    assert says in answer.json()["error"]["message"]


def test_model_info_has_sglangs_fields(server: Server) -> None:
    found = server.http.get("/model_info").json()
    assert server.http.get("/get_model_info").json() == found
    card = server.http.get("/v1/models").json()["data"][0]
    assert found["model_path"] == found["tokenizer_path"] == card["root"]
    assert found["is_generation"] is True
    assert found["weight_version"] == server.http.get("/get_weight_version").json()["weight_version"]


def test_answers_carry_the_request_id(server: Server) -> None:
    ids = {server.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    bad = server.http.get("/health", headers={"x-request-id": "a b\tc" * 100}).headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{32}", bad)
    answer = server.openai.completions.create(model="fake", prompt="a", max_tokens=1)
    assert answer._request_id
    both = server.http.get("/health").headers
    assert both["request-id"] == both["x-request-id"], "Anthropic's name of it"


def test_a_success_logs_nothing(server: Server) -> None:
    there = len(server.log.read_text())
    assert server.http.post(TEXT, json={"prompt": "ab", "max_tokens": 2}).status_code == 200
    assert server.log.read_text()[there:] == ""
