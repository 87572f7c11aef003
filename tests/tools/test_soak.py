"""``python -m benchmarks.soak``: a short one for real, and what it must not overlook."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from benchmarks import soak_bodies
from benchmarks.soak import Report, answering
from benchmarks.soak_bodies import Abilities
from benchmarks.soak_requests import (
    CHAT,
    ENDED_EARLY,
    TEXT,
    Answer,
    Case,
    Client,
    Outcome,
    cases,
    joined,
    judge,
    kinds,
)
from benchmarks.soak_server import COMPILER, LANE, Held, files_by_kind, kind_of, lives
from unisono.sandbox.forks import Template
from unisono.structured_output.json_schema.normalise import normalised

ROOT = Path(__file__).parents[2]


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.soak", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.full  # some minutes on two busy cores
def test_a_server_under_every_kind_of_request() -> None:
    result = soak("--requests", "300", "--distinct", "42", "--limit", "300", "--deaths", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {line[:20].strip(): line[20:].split() for line in result.stdout.splitlines()}
    sent, ok, refused, killed, wrong, failed, hung = map(int, lines["all"][:7])
    assert (ok, wrong, failed, hung) == (300, 0, 0, 0)
    assert sent == ok + refused + killed
    assert "2 engine deaths" in result.stdout
    own = ("schemas", "schema tools", "tools elsewhere", "left streams", "aborts", "bad bodies", "long")
    for kind in ("n > 1", "grammars", "tools", *own):
        assert int(lines[kind][1]) > 0, kind
    assert "FAILED" not in result.stdout


def test_flags_that_the_server_refuses() -> None:
    result = soak("--requests", "21", "--distinct", "21", "--no-such-flag", "1")
    assert result.returncode == 2
    assert "--no-such-flag" in result.stderr
    assert "Traceback" not in result.stderr


# ---- what it must not overlook ----------------------------------------------------------------

WHOLE = {"choices": [{"index": 0, "text": "ab", "finish_reason": "length", "seed": 1}]}


def event(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def sse(*events: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(one)}\n\n" for one in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def asked(case: Case, expected: Answer | None, answer: Callable[[httpx.Request], Any], limit: float = 5) -> Outcome:
    """How a case goes with a server that answers so."""

    async def run() -> Outcome:
        client = Client("http://server", limit)
        client.http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer))
        return await client.ask(case, expected)

    return asyncio.run(run())


STREAM = Case("streams", TEXT, {"prompt": "a", "stream": True})
ABORTED = Case("aborted", TEXT, {"prompt": "a", "stream": True}, "aborts", 1)
LEFT = Case("left", TEXT, {"prompt": "a", "stream": True}, "leaves", 2)
ONE = Case("whole", TEXT, {"prompt": "a"})
BAD = Case("bad", TEXT, {"prompt": 7}, "errs")
SAID = Answer(200, {"0 text": "abc", "0 finish": "length"})


@pytest.mark.parametrize(
    ("case", "expected", "response", "verdict"),
    [
        (ONE, Answer(200, WHOLE), httpx.Response(200, json={**WHOLE, "id": "other"}), "ok"),
        (ONE, Answer(200, {"choices": []}), httpx.Response(200, json=WHOLE), "wrong"),
        (ONE, None, httpx.Response(500, json={"error": {"message": "the engine failed"}}), "failed"),
        (ONE, None, httpx.Response(503, json={"error": {"message": "full"}}), "failed"),
        (ONE, None, httpx.Response(503, json={"error": {"message": "full"}}, headers={"retry-after": "1"}), "refused"),
        (ONE, None, httpx.Response(200, content=b"{"), "failed"),
        (STREAM, SAID, httpx.Response(200, content=sse(event("a"), event("bc", "length"))), "ok"),
        (STREAM, SAID, httpx.Response(200, content=sse(event("a"), event("bd", "length"))), "wrong"),
        (STREAM, SAID, httpx.Response(200, content=sse(event("a"), event("bc", "stop"))), "wrong"),
        (STREAM, SAID, httpx.Response(200, content=sse(event("abc", "length"), done=False)), "failed"),
        (STREAM, SAID, httpx.Response(200, content=sse(event("a"), {"error": {"message": "dead"}})), "failed"),
        (LEFT, SAID, httpx.Response(200, content=sse(event("a"), event("b"), event("x"))), "ok"),
        (LEFT, SAID, httpx.Response(200, content=sse(event("a"), event("x"), event("c"))), "wrong"),
        (BAD, None, httpx.Response(400, json={"error": {"message": "prompt=7"}}), "ok"),
        (BAD, None, httpx.Response(200, json=WHOLE), "failed"),
        (BAD, None, httpx.Response(500, json={"error": {"message": "oh"}}), "failed"),
        (ONE, Answer(200, WHOLE), httpx.Response(500, json={"error": {"message": ENDED_EARLY + "-9"}}), "killed"),
        (STREAM, SAID, httpx.Response(200, content=sse({"error": {"message": ENDED_EARLY + "-9"}})), "killed"),
        (ABORTED, SAID, httpx.Response(200, content=sse({"error": {"message": ENDED_EARLY + "-9"}})), "killed"),
    ],
)
def test_verdicts(case: Case, expected: Answer | None, response: httpx.Response, verdict: str) -> None:
    outcome = asked(case, expected, lambda request: response)
    assert outcome.verdict == verdict, outcome


def test_requests_beyond_the_time_limit_count_as_hung() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    assert asked(ONE, None, never, limit=0.2).verdict == "hung"


def test_streams_are_joined_by_choice_and_call() -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    chunks = [{"choices": [{"index": 1, "delta": {"tool_calls": [one]}}]} for one in (call, more)]
    assert joined(chunks) == {"1 call 0 name": "add", "1 call 0 arguments": '{"a": 1}'}


def test_soak_cases_cover_every_kind_and_repeat_by_seed() -> None:
    first, again = cases(420, 0, 512), cases(420, 0, 512)
    assert first == again
    assert {case.client for case in first} == {"stays", "leaves", "aborts", "errs", "reads"}
    assert {case.path for case in first} >= {TEXT, CHAT, "/v1/responses", "/v1/messages", "/metrics"}
    for case in first:
        if case.repeats and case.path in (TEXT, CHAT):
            assert "seed" in case.body, case
        assert case.patient().client in ("stays", "errs", "reads")


ALL = Abilities(("first", "second"), pictures=True)


def test_kinds_follow_the_servers_abilities() -> None:
    plain, every = kinds(Abilities()), kinds(ALL)
    assert {"schemas", "schema tools", "tools elsewhere", "left tools"} <= plain.keys()
    assert every.keys() - plain.keys() == {
        "pictures", "picture streams", "pictures elsewhere", "left pictures",
        "adapters", "adapter streams", "adapter schemas", "left adapters",
    }  # fmt: skip
    found = cases(20 * len(every), 3, 512, ALL)
    assert found == cases(20 * len(every), 3, 512, ALL)
    assert {case.kind for case in found} == every.keys()
    named = [case.body["model"] for case in found if "adapter" in case.kind]
    assert set(named) == {"first", "second"}
    assert {case.path for case in found if case.kind == "pictures elsewhere"} == {"/v1/messages", "/v1/responses"}
    assert {case.path for case in found if case.kind == "tools elsewhere"} == {"/v1/messages", "/v1/responses"}


def test_server_abilities_are_read() -> None:
    models = {"data": [{"id": "base", "parent": None}, {"id": "one", "parent": "base"}]}
    assert Abilities.read(models, {"model": {"pictures": {"max_count": 3}}}) == Abilities(("one",), True)
    assert Abilities.read({"data": [{"id": "base"}]}, {"model": {"pictures": None}}) == Abilities()


def test_schemas_are_taken_and_differ() -> None:
    rng = random.Random(1)
    made = [soak_bodies.schema(rng) for _ in range(300)]
    for schema in made:
        assert normalised(schema) is not None  # SchemaRefusedError where it is not enforced
    assert len({json.dumps(schema) for schema in made}) > 250
    assert any("$defs" in schema for schema in made)


def test_pictures_are_pictures() -> None:
    found = {soak_bodies.picture(number) for number in range(3 * soak_bodies.PICTURES)}
    assert len(found) == soak_bodies.PICTURES
    for data in found:
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        image.load()
        assert image.mode == "RGB"
        assert len(image.getcolors()) == 2


def test_reference_server_keeps_flags_that_affect_answers() -> None:
    flags = ["--lora-modules", "a=b", "c=d", "--speculative-method", "ngram", "--dtype=float32", "--num-pages", "9"]
    assert answering(flags) == ["--lora-modules", "a=b", "c=d", "--dtype=float32"]
    assert answering(["--enable_lora", "--restart-engine"]) == ["--enable_lora"]


KILLED = [Outcome("a", "killed", 1.0)]
FILES = Counter({"socket": 20, "pipe": 10}), Counter({"socket": 40})
PROCESSES = Counter({"the API process": 1, "spawn": 1, COMPILER: 2, LANE: 2})
HELD = {"pages": 0.0, "running": 0.0, "waiting": 0.0, "load": 0.0, "files": FILES, "processes": PROCESSES}
ONE_MORE = Counter({"TCP connection": 1, "socket": 20, "pipe": 10}), FILES[1]


@pytest.mark.parametrize(
    ("held", "more", "says"),
    [
        ({}, {}, None),
        ({"pages": 0.1}, {}, "pages left: 0.1"),
        ({"running": 1.0}, {}, "running left: 1"),
        ({"load": 2.0}, {}, "requests in flight left: 2"),
        ({"files": ONE_MORE}, {}, "files of the API process: 30 before, 31 after: TCP connection 0 → 1"),
        (
            {"files": (FILES[0], FILES[1] + Counter(socket=1))},
            {},
            "files of the engine process: 40 before, 41 after: socket 40 → 41",
        ),
        (
            {"processes": PROCESSES + Counter(spawn=1)},
            {},
            "processes: 6 before, 7 after: spawn 1 → 2",
        ),
        ({"processes": PROCESSES + Counter({LANE: 6})}, {}, None),
        ({"processes": PROCESSES + Counter({LANE: 7})}, {}, f"{LANE} 8 → 9"),
        ({"processes": PROCESSES + Counter({COMPILER: 1})}, {}, f"{COMPILER} 2 → 3"),
        (
            {},
            {"memory": [Counter(a=9e4, b=1e4)] * 60 + [Counter(a=9e4, b=1.3e4)] * 40},
            "memory grew by 3.0 % over the last half: b +3 MiB",
        ),
        ({}, {"preemptions": 0}, "nothing was preempted"),
        ({}, {"outcomes": [Outcome("a", "ok", 1.0)]}, "nothing was refused for overload"),
        ({}, {"outcomes": [Outcome("a", "wrong", 1.0)]}, "1 wrong"),
        ({}, {"outcomes": [Outcome("a", "hung", 1.0)]}, "1 hung"),
        ({}, {"outcomes": KILLED * 8, "deaths": 2, "slots": 4}, "nothing was refused"),
        (
            {},
            {"outcomes": KILLED * 9, "deaths": 2, "slots": 4},
            "9 requests ended with an engine; 2 deaths end at most 8",
        ),
        ({}, {"outcomes": KILLED}, "1 requests ended with an engine"),
        ({}, {"ended": ["the server ended with status 1"]}, "status 1"),
    ],
)
def test_violations(held: dict[str, Any], more: dict[str, Any], says: str | None) -> None:
    given = {"memory": [Counter(a=100)] * 100, "preemptions": 3, "outcomes": [Outcome("a", "refused", 1.0)], **more}
    report = Report(before=Held(**HELD), after=Held(**{**HELD, **held}), **given)  # type: ignore[arg-type]
    assert report.problems == [] if says is None else says in "; ".join(report.problems)
    assert "preemptions" in report.table()


def test_zombie_process_counts_as_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert lives(process.pid)
    process.kill()
    while lives(process.pid):
        pass
    process.wait()
    assert not lives(process.pid)
    assert judge(BAD, Answer(404, error="no"), None) == ("ok", "")


def test_processes_and_files_have_kinds(tmp_path: Path) -> None:
    """A report of what is left names it, so that a reader can act."""
    module = "unisono.text.templates.renderer"
    template = Template(module, [], 60)
    try:
        channel, pid = template.fork()
        owner = int(Path(f"/proc/{pid}/status").read_text().partition("PPid:")[2].split()[0])
        assert kind_of(owner, "the API process") == module
        assert kind_of(pid, module) == f"{module}, forked"
        assert kind_of(pid, f"{module}, forked") == f"{module}, forked, forked"
        channel.close()
    finally:
        template.close()
    before = files_by_kind(os.getpid())
    with socket.create_server(("127.0.0.1", 0)), (tmp_path / "a").open("wb"):
        more = files_by_kind(os.getpid()) - before
    assert more == {"TCP connection": 1, str(tmp_path / "a"): 1}
