"""``unisono serve tiny-hybrid`` for real: the launch line of docs/reference/command-line.md, and
requests over HTTP."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.conftest import ROOT, Server

LINE = (
    "tiny-hybrid --quantization fp8 --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --reasoning-parser qwen3 --mamba-scheduler-strategy extra_buffer"
)
SMALL = "--port 0 --device cpu --max-num-seqs 1 --max-model-len 384 --max-num-batched-tokens 64"
"""What keeps the start short."""

QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"
LENA: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"pens": {"type": "integer", "minimum": 0, "maximum": 999}, "sure": {"type": "boolean"}},
    "required": ["pens", "sure"],
    "additionalProperties": False,
}


FLAGS = {
    "line": LINE,
    "plain": "tiny-hybrid --quantization fp8 --reasoning-parser qwen3 --speculative-method none --graphs off",
    "bare": "tiny-hybrid",
}
"""The launch line; the same weights without speculation and without graphs; no flag at all."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The first two servers, on their way; others are added."""
    started: dict[str, Server] = {}
    try:
        for name in ("line", "plain"):
            start(name, started, tmp_path_factory)
        yield started
    finally:
        for server in started.values():
            server.kill()


def start(name: str, started: dict[str, Server], directories: pytest.TempPathFactory) -> None:
    directory = directories.mktemp(name)
    command = ["unisono", "serve", *FLAGS[name].split(), *SMALL.split()]
    started[name] = Server(command, directory / "log", directory)


@pytest.fixture(scope="module")
def line(begun: dict[str, Server]) -> Server:
    return begun["line"].wait_ready(180)


@pytest.fixture(scope="module")
def plain(begun: dict[str, Server]) -> Server:
    return begun["plain"].wait_ready(180)


@pytest.fixture(scope="module")
def bare(begun: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    start("bare", begun, tmp_path_factory)
    return begun["bare"].wait_ready(180)


def chat(server: Server, **options: Any) -> dict[str, Any]:
    """The first choice; greedy unless told otherwise."""
    body = {"messages": LENA, "max_tokens": 200, "temperature": 0, "seed": 0, "return_token_ids": True, **options}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server: Server, **options: Any) -> tuple[str, str]:
    """(thinking, content) of a stream, put together."""
    found = {"reasoning_content": "", "content": ""}
    body = {"messages": LENA, "max_tokens": 200, "temperature": 0, "stream": True, **options}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    for name in found:
                        found[name] += choice["delta"].get(name) or ""
    return found["reasoning_content"], found["content"]


def test_the_line_is_that_of_the_page() -> None:
    assert LINE in " ".join((ROOT / "docs/reference/command-line.md").read_text().replace("\\\n", " ").split())


def test_the_launch_line_thinks_and_answers(line: Server) -> None:
    choice = chat(line)
    message = choice["message"]
    assert choice["finish_reason"] == "stop"
    assert "5 * 12 = 60" in message["reasoning_content"]
    assert message["content"].rstrip().endswith("#### 51")
    assert "think>" not in message["reasoning_content"] + message["content"]
    assert streamed(line) == (message["reasoning_content"], message["content"])
    assert "no effect. A recurrent layer keeps one state" in line.log.read_text(), (
        "the note on --mamba-scheduler-strategy"
    )
    info = line.info()
    decisions = {d["name"]: d["value"] for d in info["decisions"]}
    assert decisions["weights"] == "fp8"
    assert info["speculation"]["drafter"] == "mtp"
    assert info["speculation"]["num_speculative_tokens"] == 3
    assert all(layer["choices"] > 0 for layer in info["experts"]), "the statistics of experts"
    assert len(info["experts"]) == 8


def test_drafts_change_no_token(line: Server, plain: Server) -> None:
    """Thinking and not, greedy and drawn."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for options in ({"max_tokens": 40}, {"temperature": 1, "seed": 3, "max_tokens": 40}, {**off, "max_tokens": 40}):
        assert chat(line, **options) == chat(plain, **options)
    assert chat(plain, **off, max_tokens=5)["message"]["reasoning_content"] is None
    assert plain.info()["speculation"]["drafter"] == "none"


def test_a_json_schema(line: Server, plain: Server) -> None:
    """Without thinking, and after it."""
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    for thinking in (False, True):
        asked = {"structured_outputs": form, "enable_thinking": thinking}
        choice = chat(line, **asked)
        found = json.loads(choice["message"]["content"])
        assert found.keys() == {"pens", "sure"}
        assert 0 <= found["pens"] <= 999
        assert ("5 * 12 = 60" in (choice["message"]["reasoning_content"] or "")) == thinking
        assert thinking or choice == chat(plain, **asked)


def test_a_thinking_budget(line: Server, plain: Server) -> None:
    """Cut to the token, with drafts and without, and the same in a stream."""
    free = chat(plain, max_tokens=30)
    for budget in (0, 7):
        asked = {"thinking_token_budget": budget, "max_tokens": 30}
        choice = chat(line, **asked)
        assert choice == chat(plain, **asked)
        assert choice["token_ids"][:budget] == free["token_ids"][:budget]
        message = choice["message"]
        assert message["content"]
        assert (free["message"]["reasoning_content"]).startswith(message["reasoning_content"] or "")
        assert streamed(line, **asked) == (message["reasoning_content"] or "", message["content"])


@pytest.mark.parametrize(
    "choice",
    ["required", pytest.param({"type": "function", "function": {"name": "tell"}}, marks=pytest.mark.full)],
    ids=["required", "named"],
)
def test_tool_call_after_reasoning(choice: object, line: Server, plain: Server) -> None:
    parameters = {"type": "object", "properties": {"pens": {"type": "integer", "maximum": 99}}, "required": ["pens"]}
    tools = [{"type": "function", "function": {"name": "tell", "parameters": parameters}}]
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"thinking_token_budget": 12, "max_tokens": 80}
    found = chat(line, **asked)
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["reasoning_content"]
    assert found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "tell"
    assert json.loads(call["function"]["arguments"])["pens"] <= 99
    assert found == chat(plain, **asked)


@pytest.mark.full
def test_tiny_hybrid_speculates_by_default(bare: Server) -> None:
    message = chat(bare, max_tokens=40)["message"]
    assert "5 * 12 = 60" in message["reasoning_content"], "the template's text says which parser"
    counters = bare.info()["counters"]
    assert counters["accepted_tokens"] > counters["draft_rounds"] / 2 > 0, "how many it drafts goes by the clock"
    metrics = bare.http.get("/metrics").text
    (drafts,) = [line for line in metrics.splitlines() if "spec_decode_num_drafts_total{" in line]
    assert float(drafts.rpartition(" ")[2]) > 0
    (decision,) = [d for d in bare.info()["decisions"] if d["name"] == "speculative"]
    assert decision["value"] == "mtp, k = 3"
    assert "--speculative-method none turns it off" in decision["reason"]


def test_ctrl_c_ends_them_all(begun: dict[str, Server], line: Server, plain: Server) -> None:
    for server in begun.values():
        server.signal(signal.SIGINT)
    for server in begun.values():
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()
        assert not list(server.temp.glob("unisono-*"))
