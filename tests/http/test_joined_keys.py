"""Keys that are made of several strings: different parts give different keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from tests.http.conftest import Server
from unisono.frontend.input_processor import combined_salt
from unisono.http.observability.request_note import RequestNote
from unisono.http.routes.common import SESSION_HEADERS, placement_of

PARTS = st.none() | st.text('ab-#"[', min_size=1, max_size=4)


@given(st.lists(st.tuples(PARTS, PARTS), min_size=2, max_size=8, unique=True))
def test_salts(pairs: list[tuple[str | None, str | None]]) -> None:
    assert len({combined_salt(*pair) for pair in pairs}) == len(pairs)


NAMED = st.tuples(
    st.text("ab -", max_size=3), st.sampled_from(SESSION_HEADERS), st.text("ab", min_size=1, max_size=300)
)


@given(st.lists(NAMED, min_size=2, max_size=6, unique=True))
def test_sessions(parts: list[tuple[str, str, str]]) -> None:
    """A session is its client's, its header's and its name's: two of them never share an engine by their names."""

    def session(key: str, header: str, name: str) -> str:
        request: Any = SimpleNamespace(headers={header: name}, scope={"unisono": RequestNote("r", key=key)})
        return placement_of(request).session

    assert len({session(*one)[:256] for one in parts}) == len(parts)


def test_request_and_part_ids_do_not_collide(slow_server: Server) -> None:
    """No name that a client gives its request is that of a part of another's: all of these run at once."""
    bodies: list[dict[str, Any]] = [{"request_id": "x", "n": 2}]
    bodies += [{"request_id": f"x-{i}", "n": 1 + i % 2} for i in range(3)]
    bodies += [{"request_id": name} for name in ("x-0-0", "x-0-1", "x-1-0", "y-0", "y-1", "y-0-0", "y-1-0")]
    bodies += [{"request_id": "y", "prompt": [[5, 6], [7, 8]]}, {"request_id": "z", "use_beam_search": True, "n": 2}]
    bodies += [{"request_id": "z-0-beam-8-0"}, {"request_id": "z-0-beam-8-1"}]

    def ask(body: dict[str, Any]) -> tuple[int, str]:
        fields = {"prompt": [5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
        answer = httpx.post(f"{slow_server.url}/v1/completions", json=fields, timeout=120)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(len(bodies)) as pool:
        for status, text in pool.map(ask, bodies):
            assert status == 200, text


def test_names_of_parts_are_refused(slow_server: Server) -> None:
    for path, field, prompt in (("/v1/completions", "request_id", "prompt"), ("/generate", "rid", "input_ids")):
        answer = slow_server.http.post(path, json={prompt: [5], field: "x#0"})
        assert answer.status_code == 400, answer.text
        assert field in answer.json()["error"]["message"]
