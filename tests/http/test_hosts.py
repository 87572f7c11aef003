"""Who reaches operators' routes and stored answers: known host names without keys, roles with keys."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.http.conftest import Server, servers, until
from unisono.http.security.hosts import KnownHosts
from unisono.http.security.key_file import read_keys
from unisono.types import ConfigError

TEXT, RESPONSES, CONVERSATIONS = "/v1/completions", "/v1/responses", "/v1/conversations"
BODY = {"prompt": [5, 6], "max_tokens": 2}
LONG = {**BODY, "max_tokens": 400, "ignore_eos": True}
EVIL = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evillocalhost",
    "x:y:z",
)
KNOWN = ("localhost", "localhost:1", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1:8000", "10.1.2.3", "[::1]:80")
OPEN = ("/health", "/ping", "/metrics", "/version", "/load", "/v1/models")


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


# ---- hosts, without keys ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server behind a proxy that passes on the name that clients use."""
    with servers(tmp_path_factory) as start:
        yield start(model_dir, http={"allowed_hosts": ["llm.example.com", "*.inside.example"]})


def stored_routes(server: Server) -> list[tuple[str, str, Any]]:
    """Requests that read, change or continue what is stored, and operators' ones."""
    response = server.http.post(RESPONSES, json={"input": "my secret is 7431", "max_output_tokens": 4}).json()
    conversation = server.http.post(CONVERSATIONS, json={"items": []}).json()
    one, other = f"{RESPONSES}/{response['id']}", f"{CONVERSATIONS}/{conversation['id']}"
    item = {"type": "item_reference", "id": response["output"][0]["id"]}
    return [
        ("GET", one, None),
        ("GET", f"{one}/input_items", None),
        ("POST", f"{one}/cancel", {}),
        ("POST", RESPONSES, {"input": "a", "previous_response_id": response["id"], "max_output_tokens": 4}),
        ("POST", RESPONSES, {"input": "a", "conversation": conversation["id"], "max_output_tokens": 4}),
        ("POST", RESPONSES, {"input": [item, {"role": "user", "content": "a"}], "max_output_tokens": 4}),
        ("GET", other, None),
        ("GET", f"{other}/items", None),
        ("POST", other, {"metadata": {}}),
        ("POST", f"{other}/items", {"items": [{"role": "user", "content": "b"}]}),
        ("POST", CONVERSATIONS, {}),
        ("GET", "/requests", None),
        ("GET", "/is_sleeping", None),
        ("POST", "/abort", {"request_ids": ["cmpl-none"]}),
        ("POST", "/reset_prefix_cache", {}),
        ("DELETE", other, None),
        ("DELETE", one, None),
    ]


def test_pages_with_a_rebound_name_reach_nothing_that_is_stored(named: Server) -> None:
    for method, path, body in stored_routes(named):
        for host in EVIL:
            refused = named.http.request(method, path, json=body, headers={"host": host})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unknown_host"), (path, host)
            assert "--allowed-hosts" in refused.json()["error"]["message"]
            assert "7431" not in refused.text
        for host in (*KNOWN, "llm.example.com", "LLM.example.com:443", "a.b.inside.example"):
            if method == "GET":
                assert named.http.request(method, path, json=body, headers={"host": host}).status_code == 200, host
        assert named.http.request(method, path, json=body).status_code != 403, path


def test_probes_and_services_need_no_name(named: Server) -> None:
    """A server that containers call by a service's name still answers them."""
    for path in OPEN:
        assert named.http.get(path, headers={"host": "unisono-service:8000"}).status_code == 200
    answer = named.http.post(TEXT, json=BODY, headers={"host": "unisono-service:8000"})
    assert answer.status_code == 200
    assert named.http.get("/requests", headers={"host": "inside.example"}).status_code == 403, "*. is for names below"


def test_every_name_and_wrong_ones() -> None:
    assert "evil.example" in KnownHosts(["*"])
    assert "evil.example" not in KnownHosts([], "0.0.0.0")
    assert "box.example" in KnownHosts([], "Box.example")
    for wrong in ("http://a", "a:80", "*.", "a*b", "", "a/b", "*a.example"):
        with pytest.raises(ConfigError, match="--allowed-hosts"):
            KnownHosts([wrong])


@given(st.from_regex(r"[a-z0-9:.\[\]-]{0,30}\.example\.?(:[0-9]{1,5})?", fullmatch=True))
def test_unknown_host_headers_are_rejected(header: str) -> None:
    assert header not in KnownHosts(["a.test"], "0.0.0.0")


# ---- roles, with keys -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"root {digest('k-root')} role=operator", f"alice {digest('k-alice')}", f"bob {digest('k-bob')} role=user"]
    file.write_text("\n".join(lines))
    with servers(tmp_path_factory) as start:
        yield start(step_seconds=0.02, api_key_file=str(file), host="0.0.0.0")


def ask(server: Server, key: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    return server.http.request(method, path, json=body, headers={"authorization": f"Bearer {key}", **headers})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/reset_prefix_cache"),
        ("POST", "/flush_cache"), ("POST", "/start_profile"), ("POST", "/stop_profile"),
        ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"), ("POST", "/load_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
    ],
)  # fmt: skip
def test_users_do_not_operate(roles: Server, method: str, path: str) -> None:
    for key in ("k-alice", "k-bob"):
        refused = ask(roles, key, method, path, {})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
        assert "role=operator" in refused.json()["error"]["message"]
    assert ask(roles, "wrong", method, path, {}).status_code == 401
    if path in ("/reset_prefix_cache", "/is_sleeping"):
        assert ask(roles, "k-root", method, path, {}).status_code == 200


def test_users_see_and_end_their_own(roles: Server) -> None:
    def ids(key: str) -> set[str]:
        return {one["id"].partition("#")[0] for one in ask(roles, key, "GET", "/requests").json()["requests"]}

    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(ask, roles, f"k-{name}", "POST", TEXT, {**LONG, "request_id": name})
            for name in ("alice", "bob")
        }
        until(lambda: roles.http.get("/load").json()["server_load"] == 2)
        time.sleep(0.2)
        both = {"request_ids": ["cmpl-alice", "cmpl-bob"]}
        assert ask(roles, "k-bob", "POST", "/abort", {"request_ids": ["cmpl-alice"]}).json() == {"aborted": []}
        assert ask(roles, "k-bob", "POST", "/abort_request", both).json() == {"aborted": ["cmpl-bob"]}
        assert runs["bob"].result(60).json()["choices"][0]["finish_reason"] == "abort"
        assert ask(roles, "k-bob", "POST", "/abort", {"abort_all": True}).json() == {"aborted": []}
        assert not runs["alice"].done()
        assert ask(roles, "k-root", "POST", "/abort", {"abort_all": True}).json() == {"aborted": ["cmpl-alice"]}
        assert runs["alice"].result(60).json()["choices"][0]["finish_reason"] == "abort"
    for key, own, other in (("k-alice", "cmpl-alice", "cmpl-bob"), ("k-bob", "cmpl-bob", "cmpl-alice")):
        assert own in ids(key)
        assert other not in ids(key)
    assert ids("k-root") >= {"cmpl-alice", "cmpl-bob"}
    shown = [ask(roles, key, "GET", "/server_info").json()["server"]["keys"] for key in ("k-bob", "k-root")]
    assert shown == [["bob"], ["root", "alice", "bob"]]


def test_keys_need_no_host_name(roles: Server) -> None:
    assert ask(roles, "k-root", "GET", "/requests", host="evil.example").status_code == 200


def test_without_roles_every_key_operates(tmp_path: Path) -> None:
    """As before roles: a file in which no line has one."""
    file = tmp_path / "keys"
    file.write_text(f"alice {digest('a')}\nbob {digest('b')} concurrent_requests=2\n")
    assert [key.client.role for key in read_keys(file)] == [None, None]
    file.write_text(f"alice {digest('a')} role=user concurrent_requests=2\nalice {digest('b')}\n")
    assert [key.client.role for key in read_keys(file)] == ["user", "user"]
    for wrong in ("role=king", "role=user role=user", "role="):
        file.write_text(f"alice {digest('a')} {wrong}\n")
        with pytest.raises(ConfigError, match="role=operator or role=user"):
            read_keys(file)


def test_any_key_of_a_file_without_roles_operates(tmp_path_factory: pytest.TempPathFactory) -> None:
    from types import SimpleNamespace

    from unisono.http.errors import ApiError
    from unisono.http.security.auth import ApiKey, Keys, digest_of

    def request(key: str) -> Any:
        return SimpleNamespace(headers={"x-api-key": key}, url=SimpleNamespace(path="/sleep"), client=None)

    plain = [ApiKey.named("alice", digest_of("a")), "flag"]
    for key in ("a", "flag"):
        Keys(plain).check_operator(request(key))
    mixed = Keys([ApiKey.named("alice", digest_of("a"), role="user"), "flag"])
    mixed.check_operator(request("flag"))
    with pytest.raises(ApiError, match="role=operator"):
        mixed.check_operator(request("a"))
    assert json.loads(json.dumps(mixed.names)) == ["alice", "api-key"]
