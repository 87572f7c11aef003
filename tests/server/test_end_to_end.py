"""``unisono serve`` with the bundled model: the real engine behind the real server, driven by the openai package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import Server

QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "unisono", "serve", "--port", "0", "--device", "cpu", "--max-num-seqs", "8"]
    server = Server([*command, "--served-model-name", "tiny"], directory / "log", directory)
    yield server.wait_ready()
    server.kill()


def chat(server: Server, content: str, **options) -> tuple[str, int]:
    messages = [{"role": "user", "content": content}]
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=64, **options)
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def test_it_answers(tiny: Server) -> None:
    text, cached = chat(tiny, QUESTION, temperature=0)
    assert text.endswith("#### 51")
    again, cached_again = chat(tiny, QUESTION, temperature=0)
    assert again == text
    assert cached_again > cached


def test_streaming_and_company_change_no_byte(tiny: Server) -> None:
    """Sampled with a seed: alone, streamed, and among 64 clients at once the same text comes."""
    requests = [(f"{QUESTION} {'And why? ' * (i % 5)}", 100 + i % 7) for i in range(64)]
    alone = {request: chat(tiny, request[0], temperature=1.0, seed=request[1])[0] for request in set(requests)}

    def streamed(request: tuple[str, int]) -> str:
        stream = tiny.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": request[0]}],
            max_tokens=64,
            temperature=1.0,
            seed=request[1],
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert len(set(alone.values())) > 5
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(streamed, requests)) == [alone[request] for request in requests]
    info = tiny.info()
    assert info["requests"] == {"running": 0, "waiting": 0}
    assert info["kv_cache"]["usage"] == 0


def test_it_leaves_quietly(tiny: Server) -> None:
    tiny.signal()
    assert tiny.wait() == 0
    assert "Traceback" not in tiny.log.read_text()
    assert [path.name for path in tiny.temp.iterdir()] == ["log"]
