"""The page at ``/``: its files, its headers, what it reads, and the page itself in a browser."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.server import tokenizers_
from tests.server.chromium import Browser, installed
from tests.server.conftest import Server, Start, serving, until
from unisono.program import Reason
from unisono.server.drafts import by_token
from unisono.server.routes.page import POLICY, TYPES, page_files
from unisono.types import FinishReason, TokenDelta

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAMES = sorted(page_files())


def chunks(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream."""
    answer = server.http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert frames.pop() == "[DONE]"
    return [choice for frame in frames for choice in json.loads(frame)["choices"]]


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in NAMES)])
def test_files(server: Server, path: str) -> None:
    get, head = server.http.get(path), server.http.head(path)
    assert get.status_code == head.status_code == 200
    assert head.content == b""
    name = path.removeprefix("/page/").replace("/", "") or "index.html"
    assert get.content == page_files()[name]
    for answer in (get, head):
        assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    again = server.http.get(path, headers={"if-none-match": get.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize("name", ["app.py", "..%2fapp.py", "%2e%2e/app.py", "__init__.py", "style.css/x"])
def test_nothing_else_is_a_file(server: Server, name: str) -> None:
    assert server.http.get(f"/page/{name}").status_code == 404


def test_the_policy_forbids_other_hosts() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert set(rules.values()) == {"'none'", "'self'"}


def test_no_file_names_another_host() -> None:
    assert {"index.html", "style.css", "app.js", "chat.js", "numbers.js"} <= set(NAMES)
    for name, data in page_files().items():
        text = data.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(?:https?|wss?)://|[\"'(]//|@import", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
        assert not re.search(r"<style|style=|<script(?! type=\"module\" src=\"page/)|\son\w+=", text), name
        for target in re.findall(r'(?:from|src=|href=) ?"([^"#]+)"', text):
            assert target == "docs" or target.removeprefix("./").removeprefix("page/") in NAMES, f"{name}: {target}"


def test_the_key_is_kept_for_the_tab_only() -> None:
    texts = {name: data.decode() for name, data in page_files().items()}
    assert [name for name, text in texts.items() if "sessionStorage." in text] == ["api.js"]
    assert re.findall(r'localStorage\.setItem\("([^"]+)"', "".join(texts.values())) == ["unisono-theme"]


def test_every_reason_of_an_eager_pass_is_explained() -> None:
    told = page_files()["numbers.js"].decode().partition("const REASONS = {")[2].partition("};")[0]
    assert set(re.findall(r"^  (\w+):", told, re.MULTILINE)) == {reason.name for reason in Reason}


def test_the_package_has_the_files() -> None:
    """pyproject.toml names them: a wheel has data files only where it does."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"server/page/*"' in project
    assert (files("unisono.server") / "page" / "index.html").is_file()


# ---- which tokens were drafted ----


@pytest.fixture(scope="module")
def drafting(start_module: Start, model_dir: Path) -> Server:
    """Its rounds bring four tokens: three accepted drafts and one of the model's own."""
    return start_module(model_dir, tokens_per_step=4)


@pytest.fixture(scope="module")
def start_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.server.conftest import servers

    with servers(tmp_path_factory) as start:
        yield start


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_return_drafts_tells_it_of_each_token(drafting: Server, path: str) -> None:
    asked: dict[str, Any] = (
        {"prompt": "abcdefgh"} if path == TEXT else {"messages": [{"role": "user", "content": "abcdefghijklmnop"}]}
    )
    asked |= {"max_tokens": 10, "seed": 1}
    plain = chunks(drafting, path, **asked)
    marked = chunks(drafting, path, **asked, return_drafts=True)

    def text(choices: list[dict[str, Any]]) -> str:
        return "".join(one["text"] if path == TEXT else one["delta"].get("content", "") for one in choices)

    assert text(marked) == text(plain) != ""
    assert not any("draft" in one for one in plain)
    drafts = [one["draft"] for one in marked if "draft" in one]
    positions = [0, 1, 2, None] * 2 + [0, None]
    assert [draft["position"] for draft in drafts] == positions
    assert [(draft["drafted"], draft["accepted"]) for draft in drafts] == [(3, 3)] * 8 + [(3, 1)] * 2
    assert marked[-1]["finish_reason"] == "length"


def test_usage_does_not_depend_on_return_drafts(drafting: Server) -> None:
    """A stop string ends the text within a round: the drafts after it do not count, however chunks are cut."""
    told = []
    for more in ({}, {"return_drafts": True}):
        body = {"prompt": "abcdefgh", "max_tokens": 20, "stop": "f", "stream": True, **more}
        answer = drafting.http.post(TEXT, json={**body, "stream_options": {"include_usage": True}})
        last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
        told.append(last["usage"])
    assert told[0] == told[1]
    assert told[0]["completion_tokens"] < 20


def test_drafts_come_with_ids_and_log_probabilities(drafting: Server) -> None:
    marked = chunks(drafting, TEXT, prompt="abcd", max_tokens=4, return_drafts=True, return_token_ids=True, logprobs=1)
    for one in marked[:-1]:
        assert len(one["token_ids"]) == len(one["logprobs"]["tokens"]) == 1
        assert "draft" in one


def test_return_drafts_needs_a_stream(server: Server) -> None:
    answer = server.http.post(TEXT, json={"prompt": "a", "return_drafts": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_drafts")
    assert server.http.post(TEXT, json={"prompt": "a", "return_drafts": False}).status_code == 200


def test_rounds_stay_apart_where_deltas_are_joined() -> None:
    delta = TokenDelta("r", [1], drafted_tokens=0)
    delta.absorb(TokenDelta("r", [2, 3], drafted_tokens=4, accepted_tokens=1))
    delta.absorb(TokenDelta("r", [4, 5, 6], FinishReason.STOP, drafted_tokens=2, accepted_tokens=2))
    delta.absorb(TokenDelta("r", [], FinishReason.STOP))
    parts = list(by_token(delta))
    assert [part.token_ids for part, _ in parts] == [[1], [2], [3], [4], [5], [6]]
    assert [draft and draft.position for _, draft in parts] == [None, 0, None, 0, 1, None]
    assert [part.finish for part, _ in parts] == [FinishReason.RUNNING] * 5 + [FinishReason.STOP]
    for name in ("drafted_tokens", "accepted_tokens"):
        assert sum(getattr(part, name) for part, _ in parts) == getattr(delta, name)


# ---- what the last requests waited for ----


def latest(server: Server, **headers: str) -> list[dict[str, Any]]:
    answer = server.http.get("/requests", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


def test_requests_tell_what_was_waited_for(start: Start) -> None:
    server = start(step_seconds=0.02, prefill_seconds=0.2, queue_seconds=0.05, tokens_per_step=2)
    assert latest(server) == []
    answer = server.http.post(TEXT, json={"prompt": [7, 8, 9, 10], "max_tokens": 8}).json()
    (one,) = latest(server)
    assert one["id"].startswith(answer["id"])
    assert one["queue"] == 0.05
    assert 0.1 < one["prefill"] < 2
    assert one["decode"] > 0.05
    parts = sum(one[name] for name in ("preparation", "queue", "prefill", "decode"))
    assert one["total"] == pytest.approx(parts, abs=0.05)
    assert (one["prompt_tokens"], one["cached_tokens"], one["completion_tokens"]) == (4, 2, 8)
    assert (one["drafted_tokens"], one["accepted_tokens"], one["finish_reason"], one["key"]) == (4, 4, "length", "")
    assert not {"prompt", "text", "token_ids"} & one.keys()


def test_a_hundred_are_remembered_the_latest_first(start: Start) -> None:
    server = start()
    for size in (3, 90, 12):
        server.http.post(TEXT, json={"prompt": [5], "n": size, "max_tokens": size})
    until(lambda: len(latest(server)) == 100)
    lengths = [one["completion_tokens"] for one in latest(server)]
    assert [(length, len(list(group))) for length, group in groupby(lengths)] == [(12, 12), (90, 88)]


def test_requests_are_for_operators(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(f"{name} sha256:{sha256(f'{name}-key'.encode()).hexdigest()}\n" for name in ("alice", "bob"))
    )
    keys.chmod(0o600)
    server = start(api_key_file=str(keys))
    assert server.http.get("/").status_code == server.http.get("/page/app.js").status_code == 200
    assert server.http.get("/requests").status_code == 401
    key = {"authorization": "Bearer bob-key"}
    server.http.post(TEXT, json={"prompt": [5], "max_tokens": 2}, headers=key)
    assert [one["key"] for one in latest(server, **key)] == ["bob"]


def test_web_pages_of_others_read_no_requests(server: Server) -> None:
    answer = server.http.get("/requests", headers={"origin": "https://example.org"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operators_only")


# ---- in a browser ----

QUESTION = (
    "Mia earns $12 an hour and works 5 hours a day for 3 days. She spends $45 on a gift. "
    "How much money does Mia have left?"
)
"""Which the bundled draft model knows how to go on about."""


@pytest.mark.full
@pytest.mark.skipif(installed() is None, reason="there is no Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Types a question, reads the answer as it is shown, with its marks, and the numbers."""
    flags = ("--speculative-method", "eagle3", "--speculative-model", "tiny-eagle3", "--api-key", "the-key")
    (tmp_path / "server").mkdir()
    with serving(tmp_path / "server", "tiny", *flags) as server:
        server.http.headers["authorization"] = "Bearer the-key"
        asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        expected = server.http.post(CHAT, json=asked).json()["choices"][0]["message"]["content"]
        browser = Browser(tmp_path / "profile", 1360, 820)
        try:
            browser.open(server.url + "/")
            browser.until("document.getElementById('key-dialog').open")
            browser.press("Escape", 27)
            browser.until("document.getElementById('trouble').textContent.includes('API key')")
            assert browser.run("document.getElementById('key-dialog').open") is False  # readings do not ask again
            browser.run("document.getElementById('key').click()")
            browser.type("the-key")
            browser.enter()
            browser.until("document.getElementById('model').textContent === 'tiny'")
            browser.run(
                "document.getElementById('temperature').value = '0'; document.getElementById('question').focus()"
            )
            browser.type(QUESTION)
            browser.enter()
            browser.until("document.querySelector('.facts')", 60)
            assert browser.run("document.querySelector('.answer .text').textContent") == expected
            marked = browser.run("[...document.querySelectorAll('.answer .draft')].map((one) => one.className)")
            assert {"draft p0", "draft p1", "draft p2"} == set(marked)
            assert "drafts accepted" in browser.run("document.querySelector('.facts').textContent")
            browser.until("document.querySelectorAll('#requests tbody tr').length === 2")
            assert "replayed a graph" in browser.run("document.getElementById('coverage').textContent")
            assert browser.run("document.querySelectorAll('#positions .position').length") == 3
            assert browser.run("sessionStorage.getItem('unisono-key')") == "the-key"
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            browser.resize(400, 800)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            sent = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
            assert sent
            assert all(url.startswith(server.url) and "the-key" not in url for url in sent)
            errors = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
            assert not errors
        finally:
            browser.close()


SAYS = (
    "<think>\nwhy <i>not</i>\n</think>\n\n<b>bold</b> & <img src=x onerror='window.ran = 1'>"
    '\n<tool_call>\n{"name": "now", "arguments": {"zone": "<u>UTC</u>"}}\n</tool_call>'
)
"""An answer with thinking, markup that must be shown and not obeyed, and a tool call."""
ECHO = (
    "{% for message in messages %}{{ message.content or '' }}<|im_end|>{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
"""The fake engine repeats its prompt, so every answer is the first message."""


@pytest.mark.full
@pytest.mark.skipif(installed() is None, reason="there is no Chromium")
def test_thinking_markup_tools_and_errors_in_a_browser(start: Start, tmp_path: Path) -> None:
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = ECHO
    tokenizer.save_pretrained(tmp_path / "model")
    server = start(
        tmp_path / "model", tokens_per_step=3, max_model_len=4096, reasoning_parser="qwen3", step_seconds=0.01
    )
    browser = Browser(tmp_path / "profile", 400, 800, dark=True)
    try:
        browser.open(server.url + "/")
        browser.until("document.getElementById('state').textContent === 'serving'")
        tools = json.dumps([{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}])
        browser.run(f"document.getElementById('tools').value = {json.dumps(tools)}")
        browser.run("document.getElementById('question').focus()")
        browser.type(SAYS)
        browser.enter()
        browser.until("document.querySelector('.call textarea')")
        assert browser.run("document.querySelector('.text').textContent") == (
            "<b>bold</b> & <img src=x onerror='window.ran = 1'>"
        )
        assert browser.run("document.querySelector('.thought').textContent") == "why <i>not</i>"
        assert browser.run("document.querySelector('.thinking').open") is False
        assert browser.run("document.querySelector('.call summary').textContent") == "Calls now"
        assert browser.run("document.querySelector('.call pre').textContent") == '{"zone": "<u>UTC</u>"}'
        assert browser.run("document.querySelector('#talk b, #talk i, #talk img, #talk u')") is None
        assert browser.run("window.ran === undefined")
        browser.until("document.getElementById('passes').textContent.includes('graphs are off')")
        browser.type("noon")  # the field for what the function returns has the focus
        browser.run("[...document.querySelectorAll('.answer button')].at(-1).click()")
        browser.until("document.querySelectorAll('.facts').length === 2")
        assert browser.run("getComputedStyle(document.body).colorScheme") == "dark"
        browser.run("document.getElementById('theme').click()")
        assert browser.run("getComputedStyle(document.body).colorScheme") == "light"
        browser.run("document.getElementById('tools').value = 'none'")
        browser.run("document.getElementById('question').focus()")
        browser.type("more")
        browser.enter()
        browser.until("document.querySelector('#talk .error')")
        browser.run("document.getElementById('tools').value = ''")
        browser.type("and more")
        browser.enter()
        browser.until("document.querySelector('.answer.running .draft')")
        browser.press("Escape", 27)
        browser.until("[...document.querySelectorAll('.facts')].at(-1).textContent.includes('stopped')")
        until(lambda: server.info()["aborted"] == 1)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert not [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
    finally:
        browser.close()
