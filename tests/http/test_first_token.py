"""Nothing of a stream leaves before its first token, so that clients measure the time that the metrics report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server, in_one_try, servers
from tests.http.fake_engine import Trick
from tests.http.tokenizers_ import byte_level

PREFILL = 0.4
"""Seconds to the first token."""
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def waiting(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose first tokens take PREFILL seconds, and the others 20 ms."""
    with servers(tmp_path_factory) as start:
        yield start(model_dir, prefill_seconds=PREFILL, step_seconds=0.02)


def timed(server: Server, path: str, **body: Any) -> tuple[float, list[tuple[float, dict[str, Any]]]]:
    """Seconds from sending to the first byte of any kind after the headers, and to each event."""
    begin = time.monotonic()
    chunks: list[tuple[float, dict[str, Any]]] = []
    first = None
    with server.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        rest = b""
        for data in response.iter_raw():
            first = first or time.monotonic() - begin
            *frames, rest = (rest + data).split(b"\n\n")
            for frame in frames:
                if frame != b"data: [DONE]":
                    chunks.append((time.monotonic() - begin, json.loads(frame.removeprefix(b"data: "))))
    assert first is not None
    return first, chunks


def first_token_metric(server: Server) -> tuple[float, float]:
    """Sum of seconds and count of the time to first token."""
    lines = server.http.get("/metrics").text.splitlines()
    name = "unisono:time_to_first_token_seconds_"
    found = {line[len(name) :].split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith(name)}
    return found["sum"], found["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "n": 3, "logprobs": True}),
        (TEXT, {"prompt": "abc"}),
        (TEXT, {"prompt": ["abc", "def"], "return_token_ids": True}),
        (TEXT, {"prompt": "abc", "echo": True}),
    ],
    ids=["chat", "n", "completion", "prompts", "echo"],
)
def test_no_chunk_comes_before_the_first_token(waiting: Server, path: str, body: dict[str, Any]) -> None:
    sum_before, count_before = first_token_metric(waiting)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    first, chunks = timed(waiting, path, max_tokens=6, ignore_eos=True, stream_options=usage, **body)
    assert first >= PREFILL
    for _, chunk in chunks[bool(body.get("echo")) :]:  # an echoed prompt comes with the first token, not counted yet
        assert chunk["usage"]["completion_tokens"] > 0, "a chunk before any token"
    seconds, count = (
        new - old for new, old in zip(first_token_metric(waiting), (sum_before, count_before), strict=True)
    )
    assert count == max(1, body.get("n", 1), len(body["prompt"]) if isinstance(body.get("prompt"), list) else 0)
    assert PREFILL <= seconds / count <= chunks[-1][0], "the metric is not what the client measured"


def test_the_opening_chunk_of_every_choice_comes_with_its_first_token(waiting: Server) -> None:
    """Role and seed come once for each choice, and before its text; the first text follows at once."""
    body = {"n": 2, "max_tokens": 6, "seed": 7, "ignore_eos": True, "skip_special_tokens": False}

    def check() -> None:
        _, chunks = timed(waiting, CHAT, messages=MESSAGES, **body)
        for index in range(2):
            mine = [(when, c["choices"][0]) for when, c in chunks if c["choices"][0]["index"] == index]
            assert mine[0][1]["delta"] == {"role": "assistant", "content": ""}
            assert mine[0][1]["seed"] == 7 + index
            assert mine[1][1]["delta"]["content"]
            assert mine[1][0] - mine[0][0] < 0.015, "the first text waited for another step"
            assert all("role" not in choice["delta"] and "seed" not in choice for _, choice in mine[1:])

    in_one_try(check)


def test_first_token_without_text_is_sent_at_once(waiting: Server) -> None:
    """The first bytes of a character: the chunk says that a token has come."""

    def check() -> None:
        first, chunks = timed(waiting, TEXT, prompt="🙂", max_tokens=len(byte_level().encode("🙂")))
        texts = [(when, chunk["choices"][0]["text"]) for when, chunk in chunks]
        assert texts[0][1] == ""
        assert "".join(text for _, text in texts) == "🙂"
        assert PREFILL <= first < texts[1][0] - 0.03

    in_one_try(check)


def test_errors_before_the_first_token_keep_their_status(waiting: Server) -> None:
    refused = waiting.http.post(TEXT, json={"prompt": [Trick.REJECT], "stream": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "fake")
    assert waiting.http.post(TEXT, json={"prompt": "a", "stream": True, "n": 0}).status_code == 400
    frames = waiting.http.post(TEXT, json={"prompt": [Trick.FAIL], "stream": True}).text.split("\n\n")
    assert "a fake failure" in json.loads(frames[0].removeprefix("data: "))["error"]["message"]
    assert frames[1:] == ["data: [DONE]", ""]
