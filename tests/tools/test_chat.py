"""``unisono chat`` as a person has it: in a pseudo-terminal and in a pipe, with a server and with its own model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.forks import PROGRAMS
from tests.terminal import ROOT, terminal
from tests.tools.scripted_server import END, STREAM, Scripted, plain, scripted, sse, usage
from unisono.tools.chat.session import _stoppable

CARD = {"id": "m", "owned_by": "unisono", "max_model_len": 64}
SPECULATION = {"drafter": "mtp", "num_speculative_tokens": 3}
MODELS = json.dumps({"data": [CARD], "engine": {"speculation": SPECULATION}})
SMALL = ["--device", "cpu", "--max-num-seqs", "1", "--max-model-len", "512"]


def said(draft: tuple[int | None, int, int] | None = None, **delta: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
    if draft is not None:
        choice["draft"] = dict(zip(("position", "drafted", "accepted"), draft, strict=True))
    return {"choices": [choice]}


async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """What the last message says: an answer with thinking and drafts, an endless one, or a refusal."""
    asked = body["messages"][-1]["content"]
    if asked == "bad":
        yield plain("400 Bad Request", '{"error": {"message": "temperature=9 is above 2."}}')
        return
    yield STREAM
    if asked == "endless":
        while True:
            yield sse(said(content="and on "))
            await asyncio.sleep(0.02)
    yield sse(said(reasoning_content="hmm"), said((0, 2, 2), content="one "), said((1, 2, 2), content="two\n"))
    yield sse(said((None, 2, 2), content="three "), said((None, 2, 0), content="four"), usage(3, 5)) + END


def piped(server: Scripted, lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return PROGRAMS.finished("-m", "unisono", "chat", "--url", server.url, *flags, text=lines, timeout=60)


def test_a_chat_with_a_server_in_a_terminal(tmp_path: Path) -> None:
    with scripted(answer, MODELS) as server:
        flags = ["chat", "--url", f"{server.url}/v1", "--system", "be brief", "--temperature", "0"]
        with terminal(*flags, XDG_STATE_HOME=str(tmp_path)) as screen:
            banner = screen.wait_for("› ")
            assert "Unisono · m at http" in banner
            assert "context 64 tokens" in banner
            assert "speculates with mtp, k = 3" in banner
            screen.type("hello\n")
            shown = screen.wait_for("› ")
            assert "hmm\r\n\r\none two\r\nthree four\r\n" in shown
            assert re.search(
                r"5 tokens · [\d.]+ tokens/s · first after \d+ ms · accept length 2.00 \(2 of 4 drafts\)", shown
            )
            assert "\x1b[2mhmm\x1b[0m" in screen.shown  # thinking is dimmed
            assert "\x1b[32mone \x1b[0m\x1b[36mtwo\x1b[0m" in screen.shown  # accepted drafts, by place
            assert "\x1b[0m\r\nthree " in screen.shown  # the model's own token has no colour …
            assert "\x1b[4mfour\x1b[0m" in screen.shown  # … but a mark where a draft was rejected

            screen.type("endless\n")
            screen.wait_for("and on and on")
            screen.interrupt()
            assert "stopped" in screen.wait_for("› ")

            screen.type("/params top_p=0.5 stop=x seed=7\n")
            assert '"x"' in screen.wait_for("› ")
            screen.type("/params seed=default nonsense=1\n")
            assert "nonsense=1: give name=value, and one of temperature, " in " ".join(screen.wait_for("› ").split())
            screen.type("bad\n")
            assert "400: temperature=9 is above 2." in screen.wait_for("› ")
            screen.type("/help\n")
            shown = screen.wait_for("› ")
            assert all(f"/{name}" in shown for name in ("help", "params", "system", "clear", "drafts", "save", "quit"))
            screen.type(f"/save {tmp_path / 'chat.json'}\n")
            screen.wait_for("5 messages are in")
            screen.type("/clear\n/system none\n/drafts off\n")
            screen.wait_for("colours of drafts are off")
            screen.type("two \\\nlines\n")
            screen.wait_for("tokens/s")
            screen.wait_for("› ")
            screen.interrupt_until("Ctrl-D or /quit ends")
            screen.wait_for("› ")  # before that the terminal is no longer readline's, and Ctrl-D is lost
            screen.type("\x04")
            assert screen.wait_end() == 0
    bodies = server.bodies
    first, endless, bad, last = bodies
    assert first["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (first["temperature"], first["stream"], first["return_drafts"]) == (0, True, True)
    assert endless["messages"][2] == {"role": "assistant", "content": "one two\nthree four"}
    assert (bad["top_p"], bad["stop"], bad["seed"]) == (0.5, "x", 7)
    assert last["messages"] == [{"role": "user", "content": "two \nlines"}]
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [one["role"] for one in saved["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert saved["messages"][2]["reasoning_content"] == "hmm"
    assert saved["parameters"] == {"temperature": 0, "top_p": 0.5, "stop": "x", "seed": 7}
    history = (tmp_path / "unisono" / "chat_history").read_text().splitlines()
    assert history[:2] == ["hello", "endless"]


def test_ctrl_c_is_not_lost_with_its_exception() -> None:
    with _stoppable(at_once=True) as stopped:
        assert not stopped()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        assert stopped()


def test_chat_with_another_openai_server_in_a_pipe() -> None:
    """No colours, one answer a line, nothing but answers on standard output, no field that only Unisono knows."""
    with scripted(answer, '{"data": [{"id": "other"}]}') as server:
        done = piped(server, "hello\nbad\n/params top_k=3\n\nhello\n/quit\nnever\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "one two\\nthree four\n\none two\\nthree four\n"
        assert "\x1b" not in done.stdout
        assert "400: temperature=9" in done.stderr
        assert [body["model"] for body in server.bodies] == ["other"] * 3
        assert all("return_drafts" not in body for body in server.bodies)
        assert server.bodies[-1]["top_k"] == 3


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--url", "nonsense"], 2, "--url nonsense: give http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1: "),
        (["--url", "http://127.0.0.1:1", "--graphs", "full"], 2, "--graphs is for an engine in this process"),
        (["--api-key", "k"], 2, "--api-key is for a server"),
    ],
)
def test_errors(arguments: list[str], status: int, says: str) -> None:
    command = [sys.executable, "-m", "unisono", "chat", *arguments]
    done = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_the_server_lacks_is_named() -> None:
    with scripted(answer, MODELS) as server:
        done = piped(server, "hello\n", "nonsense")
    assert (done.returncode, server.bodies) == (2, [])
    assert "has no model 'nonsense'; it serves m." in done.stderr


def test_a_model_of_its_own_in_a_terminal(tmp_path: Path) -> None:
    flags = ["--speculative-method", "ngram", *SMALL, "--max-tokens", "60", "--temperature", "0"]
    with terminal("chat", "tiny", *flags, XDG_STATE_HOME=str(tmp_path)) as screen:
        banner = screen.wait_for("› ", 60)
        assert "tiny · Qwen3ForCausalLM, float32 on cpu · context 512 tokens" in banner
        assert "speculates with ngram, k = 3" in banner
        screen.type("/params temperature=x\n")
        assert "temperature" in screen.wait_for("› ")
        screen.type("Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?\n")
        shown = screen.wait_for("› ", 30)
        assert "####" in shown
        assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after \d+ ms · .*seed \d+", " ".join(shown.split()))
        screen.type("/params ignore_eos=true max_tokens=default\n")
        screen.wait_for("› ")
        screen.type("Tom has 3 apples and buys 4 more. How many apples does he have?\n")
        screen.wait_for("####")
        screen.interrupt()
        assert "stopped" in screen.wait_for("› ", 30)
        screen.type("/quit\n")
        assert screen.wait_end(30) == 0
