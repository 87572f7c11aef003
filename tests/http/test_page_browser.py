"""The page in a headless Chromium: the chat, pictures, errors, the numbers, and hostile output of a model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.http import pictures_, tokenizers_
from tests.http.chromium import Browser, installed
from tests.http.conftest import Server, Start, serving, until

pytestmark = [pytest.mark.full, pytest.mark.skipif(installed() is None, reason="there is no Chromium")]

CHAT = "/v1/chat/completions"
ECHO = (
    "{% for message in messages %}{{ message.content or '' }}<|im_end|>{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
"""The fake engine repeats its prompt, so every answer is the first message."""
ANSWERED = "document.querySelector('.answer:not(.running) .facts')"
NARROW = 390


@contextmanager
def browsing(directory: Path, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Browser]:
    """The page in a browser. At the end: no script of it has failed, and it has asked no other host for anything."""
    browser = Browser(directory / "profile", width, height, dark)
    try:
        browser.open(url + "/")
        yield browser
        sent = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert sent
        assert [one for one in sent if not one.startswith((url, f"blob:{url}"))] == []
        assert [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"] == []
    finally:
        browser.close()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers repeat the first message, three tokens a round."""
    from tests.http.conftest import servers

    path = tmp_path_factory.mktemp("echo")
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = ECHO
    tokenizer.save_pretrained(path)
    with servers(tmp_path_factory) as start:
        yield start(path, tokens_per_step=3, max_model_len=4096, reasoning_parser="qwen3", step_seconds=0.01)


def serves(browser: Browser) -> None:
    browser.until("document.getElementById('state').classList.contains('good')")


def ask(browser: Browser, text: str) -> None:
    """Type a question and send it."""
    browser.run("document.getElementById('question').focus()")
    browser.type(text)
    browser.enter()


def answer(browser: Browser, text: str) -> None:
    """Type a question, send it, and wait until it is answered."""
    before = browser.run("document.querySelectorAll('.answer').length")
    ask(browser, text)
    browser.until(f"document.querySelectorAll('.answer').length > {before}")
    browser.until("!document.querySelector('.answer.running')")


def text_of(browser: Browser, selector: str) -> Any:
    return browser.run(f"document.querySelector({json.dumps(selector)})?.textContent")


def fits(browser: Browser) -> None:
    """Nothing is wider than the window, and no text is cut off."""
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    cut = browser.run("""[...document.querySelectorAll('body *')].filter((one) => {
      const box = one.getBoundingClientRect();
      if (!box.width || !box.height || one.closest('.hidden, .skip, svg, pre, .table')) return false;
      return box.right > innerWidth + 0.5 || box.left < -0.5;
    }).map((one) => one.outerHTML.slice(0, 120))""")
    assert cut == []
    cut = browser.run("""[...document.querySelectorAll('button, p, span, th, td, dd, h1, h2, h3, label')]
      .filter((one) => one.offsetParent && !one.closest('.hidden') && one.scrollWidth > one.clientWidth + 1
        && getComputedStyle(one).display !== 'inline').map((one) => one.outerHTML.slice(0, 120))""")
    assert cut == []


QUESTION = (
    "Mia earns $12 an hour and works 5 hours a day for 3 days. She spends $45 on a gift. "
    "How much money does Mia have left?"
)
"""Which the bundled draft model continues well."""


def test_a_real_model_with_a_key(tmp_path: Path) -> None:
    """The answer, its marks and the numbers, which agree."""
    flags = ("--speculative-method", "eagle3", "--speculative-model", "tiny-eagle3", "--enforce-eager")
    flags = (*flags, "--api-key", "the-key")
    (tmp_path / "server").mkdir()
    with serving(tmp_path / "server", "tiny", *flags) as server:
        server.http.headers["authorization"] = "Bearer the-key"
        asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        expected = server.http.post(CHAT, json=asked).json()
        with browsing(tmp_path, server.url, 1360, 820) as browser:
            browser.until("document.getElementById('key-dialog').open")
            browser.press("Escape", 27)
            browser.until("document.getElementById('state-text').textContent === 'key needed'")
            assert browser.run("document.getElementById('key-dialog').open") is False  # readings do not ask again
            browser.run("document.getElementById('key').click()")
            browser.type("the-key")
            browser.enter()
            browser.until("document.getElementById('state-text').textContent === 'tiny'")
            browser.until("document.querySelectorAll('.suggestion').length === 3")
            browser.run("document.getElementById('temperature').value = '0'")
            answer(browser, QUESTION)
            content = expected["choices"][0]["message"]["content"]
            copied = "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
            browser.run(copied)
            browser.run("document.querySelector('.answer .foot button[aria-label=\"Copy answer\"]').click()")
            browser.until("window.copied !== undefined")
            assert browser.run("window.copied") == content
            number = content.rpartition("#### ")[2]
            assert text_of(browser, ".answer h6") == number  # its answers end with a heading of level 4
            marked = browser.run("[...document.querySelectorAll('.answer .draft')].map((one) => one.className)")
            assert {"draft p0"} <= set(marked) <= {"draft p0", "draft p1", "draft p2"}  # k adapts to measured times
            facts = text_of(browser, ".facts")
            assert f"{expected['usage']['completion_tokens']} tokens · " in facts
            assert "drafts accepted" in facts
            browser.until("document.querySelectorAll('#requests li b').length === 2")
            generated = browser.run("document.querySelector('#requests li .quiet').textContent")
            assert f"{expected['usage']['completion_tokens']} generated" in generated
            assert text_of(browser, "#coverage").startswith("0 % of ")
            assert "graphs are off" in text_of(browser, "#passes")
            assert browser.run("document.querySelectorAll('#positions .position').length") == 3
            assert browser.run("document.querySelector('#latency-note').textContent").startswith("2 requests")
            assert browser.run("sessionStorage.getItem('unisono-key')") == "the-key"
            sent = [e["params"]["request"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
            assert not any("the-key" in one["url"] for one in sent)
            fits(browser)
            browser.resize(NARROW, 800)
            fits(browser)
            browser.run("document.querySelector('[data-show=numbers]').click()")
            fits(browser)


ATTACK = """<script>window.ran = 1</script>

Text <img src=x onerror="window.ran = 2"> and <svg onload="window.ran = 3"></svg> <style>body { display: none }</style>

[a](javascript:window.ran=4) [b](JaVaScRiPt:window.ran=5) [c](data:text/html;base64,PHNjcmlwdD4=)
<javascript:window.ran=6>
[d](<java\tscript:window.ran=7>) [e](vbscript:x) [f](&#106;avascript:window.ran=8) [g](//example.invalid/x) [h][ref]
![i](https://example.invalid/i.png) ![j](data:image/svg+xml,<svg/onload=window.ran=9>)
[k](https://example.invalid/k "t")
![l](javascript:window.ran=10) https://example.invalid/m <a href="javascript:window.ran=11">n</a>

| <iframe src="javascript:window.ran=12"></iframe> | x |
|---|---|
| <b onclick="window.ran = 13">y</b> | <br> |

```html"><img src=x onerror=window.ran=14>
<script>window.ran = 15</script>
```

<form action="https://example.invalid"><input autofocus onfocus="window.ran = 16"></form>
<link rel=stylesheet href="https://example.invalid/x.css"><meta http-equiv=refresh content="0;url=https://example.invalid">

[ref]: javascript:window.ran=17
"""


def test_hostile_output_is_inert(echo: Server, tmp_path: Path) -> None:
    """Markup is shown as text, links lead to the web only, and nothing is loaded from there."""
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        answer(browser, ATTACK)
        tags = browser.run("[...new Set([...document.querySelectorAll('.markdown *')].map((one) => one.localName))]")
        allowed = {"p", "span", "a", "table", "thead", "tbody", "tr", "th", "td", "br", "div", "pre", "code"}
        allowed |= {"button", "svg", "use"}  # of the button that copies code
        assert set(tags) <= allowed
        assert browser.run("document.querySelectorAll('.markdown svg:not(.icon)').length") == 0
        attributes = browser.run("""[...new Set([...document.querySelectorAll('.markdown *')]
          .flatMap((one) => one.getAttributeNames()))]""")
        assert set(attributes) <= {
            "class", "title", "href", "target", "rel", "tabindex", "type", "aria-label", "aria-hidden",
        }  # fmt: skip
        links = browser.run("""[...document.querySelectorAll('.markdown a')]
          .map((one) => [one.textContent, one.getAttribute('href'), one.rel, one.target])""")
        assert {href for _, href, _, _ in links} == {
            "https://example.invalid/i.png", "https://example.invalid/k", "https://example.invalid/m",
        }  # fmt: skip
        assert all((rel, target) == ("noopener noreferrer nofollow", "_blank") for _, _, rel, target in links)
        shown = browser.run("document.querySelector('.markdown').textContent")
        for part in ("<script>window.ran = 1</script>", 'onerror="window.ran = 2"', "<style>", "<iframe", "<form"):
            assert part in shown
        browser.run("""[...document.querySelectorAll('.markdown *')].filter((one) => one.localName !== 'a')
          .forEach((one) => one.click?.())""")
        assert browser.run("window.ran === undefined")
        assert browser.run("getComputedStyle(document.body).display") == "flex"


def test_text_never_becomes_markup(echo: Server, tmp_path: Path) -> None:
    """The browser itself refuses it, by the page's policy, and inline scripts and styles too."""
    with browsing(tmp_path, echo.url) as browser:
        tried = browser.run("""(() => {
          try { document.body.innerHTML = '<b>x</b>'; return 'taken'; } catch (error) { return error.name; }
        })()""")
        assert tried == "TypeError"
        browser.run("""(() => {
          const style = document.createElement('style');
          style.textContent = 'body { display: none }';
          document.head.append(style);
        })()""")
        assert browser.run("getComputedStyle(document.body).display") == "flex"


CLASSES = """(() => {
  const walker = document.createTreeWalker(document.querySelector('%s'), NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const one = walker.currentNode;
    const name = one.parentElement.localName === 'span' ? one.parentElement.className : '';
    found.push(...[...one.data].map(() => name));
  }
  return found;
})()"""
"""The mark of each character of an element."""


def marks_of(server: Server, text: str) -> list[str]:
    """The mark that each character of an answer must have, by the server's own stream."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "return_drafts": True}
    marks: list[str] = []
    for line in server.http.post(CHAT, json=body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            draft = choice.get("draft") or {"position": None}
            mark = "" if draft["position"] is None else f"draft p{draft['position']}"
            marks += [mark] * len(choice["delta"].get("content") or "")
    assert len(marks) == len(text)
    return marks


MARKDOWN = """# Title

A *slanted* and **bold** `code` line
with a second line, 1 &lt; 2 \\* [link](https://example.invalid/a_b) and \\(x\\).

- one
- [x] two
  1. inner

> quoted
> twice

| left | right |
|------|------:|
| a | `b` |

```python
def f(x):
    return x < 1
```

~~repeat~~**repeat**

Last."""


def test_markdown_and_marks(echo: Server, tmp_path: Path) -> None:
    """Elements are right, and every marked token is where the server says that a draft was accepted."""
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        answer(browser, MARKDOWN)
        texts = {
            "h3": "Title", "em": "slanted", "strong": "bold", "p code": "code", "a": "link", "li li": "inner",
            "blockquote": "quotedtwice", "thead th": "left", "td.to-right code": "b", ".language": "python",
            ".code pre": "def f(x):\n    return x < 1", ".markdown > p:last-child": "Last.",
        }  # fmt: skip
        for selector, expected in texts.items():
            assert text_of(browser, f".answer .markdown {selector}".replace(".markdown .markdown", ".markdown")) == (
                expected
            ), selector
        shown = text_of(browser, ".answer .markdown")
        assert "1 < 2 * link and \\(x\\)." in shown
        assert "☑ two" in shown
        marks = marks_of(echo, MARKDOWN)
        assert {"", "draft p0", "draft p1"} == set(marks)
        for selector, part in (
            ("h3", "Title"), ("em", "slanted"), ("strong", "bold"), ("blockquote", "quoted"), ("li li", "inner"),
            (".code pre", "def f(x):\n    return x < 1"), ("a", "link"), ("> p:last-child", "Last."),
            ("del", "repeat"), ("del + strong", "repeat"),
        ):  # fmt: skip
            start = MARKDOWN.rindex(part) if "+" in selector else MARKDOWN.index(part)
            found = browser.run(CLASSES % f".answer .markdown {selector}")[: len(part)]
            assert found == marks[start : start + len(part)], selector
        background = "getComputedStyle(document.querySelector('.answer .p1')).backgroundColor"
        assert browser.run(background) != "rgba(0, 0, 0, 0)"
        assert browser.run("document.getElementById('drafts-panel').hidden")
        browser.run("document.getElementById('drafts').click()")
        assert browser.run("document.getElementById('drafts').getAttribute('aria-expanded')") == "true"
        assert browser.run("document.getElementById('legend').offsetHeight > 0")
        browser.run("document.getElementById('marks').click()")
        assert browser.run(background) == "rgba(0, 0, 0, 0)"
        browser.press("Escape", 27)
        browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        browser.run("document.querySelector('.code button').click()")
        browser.until("window.copied")
        assert browser.run("window.copied") == texts[".code pre"]
        browser.resize(NARROW, 800)
        fits(browser)


def test_thinking_tools_and_settings(start: Start, echo: Server, tmp_path: Path) -> None:
    says = (
        "<think>\nwhy <i>not</i>\n</think>\n\n<b>bold</b> & *so* <img src=x onerror='window.ran = 1'>"
        '\n<tool_call>\n{"name": "now", "arguments": {"zone": "<u>UTC</u>"}}\n</tool_call>'
    )
    with browsing(tmp_path, echo.url, NARROW, 800, dark=True) as browser:
        serves(browser)
        browser.run("document.getElementById('settings').click()")
        fits(browser)
        tools = json.dumps([{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}])
        browser.run(f"document.getElementById('tools').value = {json.dumps(tools)}")
        ask(browser, says)
        browser.until("document.querySelector('.call textarea')")
        assert text_of(browser, ".text") == "<b>bold</b> & so <img src=x onerror='window.ran = 1'>"
        assert text_of(browser, ".thought") == "why <i>not</i>"
        assert browser.run("document.querySelector('.thinking').open") is False
        assert text_of(browser, ".call summary") == "Calls now"
        assert text_of(browser, ".call pre") == '{"zone": "<u>UTC</u>"}'
        fits(browser)
        browser.type("noon")  # the field for the function's result has the focus
        browser.run("[...document.querySelectorAll('.answer button.strong')].at(-1).click()")
        browser.until("document.querySelectorAll('.facts').length === 2")
        assert browser.run("getComputedStyle(document.body).colorScheme") == "dark"
        browser.run("document.getElementById('theme').click()")
        assert browser.run("getComputedStyle(document.body).colorScheme") == "light"
        browser.run("document.getElementById('tools').value = 'none'")
        ask(browser, "more")
        browser.until("document.getElementById('problem').textContent.includes('not valid JSON')")
        assert browser.run("document.getElementById('question').value") == "more"  # nothing typed is lost


def test_stop_retry_edit_and_new_chat(start: Start, echo: Server, tmp_path: Path) -> None:
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        ask(browser, "a long question " + "which the answer repeats " * 100)
        browser.until("document.querySelector('.answer.running .draft')")
        browser.type("the next question")  # may be typed while an answer runs
        browser.enter()
        assert browser.run("document.querySelectorAll('.question').length") == 1
        aborted = echo.info()["aborted"]
        browser.press("Escape", 27)
        browser.until("document.querySelector('.facts')?.textContent.includes('stopped')")
        until(lambda: echo.info()["aborted"] == aborted + 1)
        assert browser.run("document.getElementById('question').value") == "the next question"
        browser.run("document.getElementById('max_tokens').value = '9'")
        browser.run("document.querySelector('.answer button[aria-label=\"Ask again\"]').click()")
        browser.until("document.querySelector('.facts')?.textContent.includes('token limit')")
        assert browser.run("document.querySelectorAll('.answer').length") == 1
        repeated = text_of(browser, ".answer .text")
        assert repeated
        assert "a long question which".startswith(repeated)
        browser.enter()
        browser.until("document.querySelectorAll('.facts').length === 2")
        browser.run("document.querySelector('.question button[aria-label=\"Edit question\"]').click()")
        assert browser.run("document.getElementById('question').value").startswith("a long question")
        browser.run("document.getElementById('question').select()")
        browser.type("another question")
        browser.enter()
        browser.until("document.querySelectorAll('.question').length === 1 && " + ANSWERED)
        assert "another question".startswith(text_of(browser, ".answer .text"))
        assert browser.run("document.querySelectorAll('.answer').length") == 1
        browser.type("typed, not sent")
        browser.run("window.before = true; setTimeout(() => location.reload())")
        browser.until("!window.before && document.getElementById('question')?.value === 'typed, not sent'")
        browser.until("document.readyState === 'complete' && document.getElementById('state') !== null")
        serves(browser)
        browser.run("document.getElementById('new').click()")
        assert browser.run("document.getElementById('empty').hidden") is False
        browser.until("document.querySelectorAll('.suggestion').length === 3")
        browser.run("document.querySelector('.suggestion').click()")
        browser.until(ANSWERED)


def test_errors_are_shown_and_nothing_is_lost(start: Start, tmp_path: Path) -> None:
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = ECHO
    tokenizer.save_pretrained(tmp_path / "model")
    server = start(tmp_path / "model", tokens_per_step=3, step_seconds=0.1, max_model_len=600)
    with browsing(tmp_path, server.url) as browser:
        serves(browser)
        answer(browser, "x" * 700)
        assert "600" in text_of(browser, ".failure p")  # the server's words: the context
        assert text_of(browser, ".failure .quiet") == "HTTP 400"
        browser.run("document.getElementById('max_tokens').value = '30'")
        answer(browser, "short " * 20)  # without the question that has no answer
        assert browser.run("document.querySelectorAll('.failure').length") == 1
        browser.run("document.getElementById('max_tokens').value = ''")
        ask(browser, "cut this")
        browser.until("document.querySelector('.answer.running .draft')")
        browser.type("not lost")
        server.process.kill()
        browser.until("document.querySelectorAll('.failure').length === 2")
        card = browser.run("[...document.querySelectorAll('.failure')].at(-1).textContent")
        assert card.startswith("The answer was cut off")
        assert "The connection to the server ended" in card
        kept = browser.run("[...document.querySelectorAll('.answer .text')].at(-1).textContent")
        assert kept
        assert ("short " * 20).startswith(kept)
        assert browser.run("document.getElementById('question').value") == "not lost"
        browser.enter()
        browser.until("document.querySelectorAll('.failure').length === 3")
        card = browser.run("[...document.querySelectorAll('.failure')].at(-1).textContent")
        assert "does not answer" in card
        assert "Try again" in card
        assert browser.run("[...document.querySelectorAll('.asked')].at(-1).textContent") == "not lost"
        browser.until("document.getElementById('state-text').textContent === 'no connection'")
        assert "does not answer" in text_of(browser, "#trouble")
        browser.resize(NARROW, 800)
        fits(browser)
        browser.events = [e for e in browser.events if e["method"] != "Runtime.exceptionThrown"]


def test_a_stream_without_its_last_event_was_cut_off(echo: Server, tmp_path: Path) -> None:
    """As where a proxy ends the connection in good order."""
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        browser.run("""(() => {
          const real = window.fetch;
          window.fetch = async (path, options) => {
            const response = await real(path, options);
            if (!path.endsWith('chat/completions')) return response;
            const text = await response.text();
            return new Response(text.replace('data: [DONE]\\n\\n', ''), { headers: response.headers });
          };
        })()""")
        answer(browser, "hello")
        assert text_of(browser, ".failure strong") == "The answer was cut off"
        assert "ended before the answer did" in text_of(browser, ".failure p")


def test_page_prompts_for_a_missing_api_key(start: Start, model_dir: Path, tmp_path: Path) -> None:
    server = start(model_dir, api_key="the-key")
    with browsing(tmp_path, server.url) as browser:
        browser.until("document.getElementById('key-dialog').open")
        browser.run("document.getElementById('key-cancel').click()")
        ask(browser, "hello")
        browser.until("document.getElementById('key-dialog').open")
        browser.type("wrong")
        browser.enter()
        browser.until("document.querySelector('.failure')")
        assert text_of(browser, ".failure .quiet") == "HTTP 401"
        browser.run(
            "[...document.querySelectorAll('.failure button')].find((b) => b.textContent === 'Enter a key').click()"
        )
        browser.until("document.getElementById('key-dialog').open")
        browser.type("the-key")
        browser.enter()
        browser.until(ANSWERED)
        assert text_of(browser, ".asked") == "hello"


def test_running_while_the_answer_streams(echo: Server, tmp_path: Path) -> None:
    """The tile is read at every change of the page from the first token to the end."""
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        browser.run("""(() => {
          window.seen = [];
          new MutationObserver(() => {
            if (!document.querySelector('.answer.running .text')) return;
            window.seen.push(document.querySelector('#tiles b').textContent);
          }).observe(document.body, { subtree: true, childList: true, characterData: true });
        })()""")

        def readings() -> list[float]:
            browser.run("0")  # events come with the answers to commands
            sent = [e["params"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
            return [one["timestamp"] for one in sent if one["request"]["url"].endswith("/page/state")]

        ask(browser, "hello " * 300)
        browser.until("document.querySelector('.answer.running .text')")
        before = len(readings())
        browser.until("!document.querySelector('.answer.running')")
        times = readings()[before:]
        # every half second, while the slow rate is one in 2 s; the beginning and the end of the answer add one each
        assert sum(later - earlier < 1.5 for earlier, later in pairwise(times)) >= 3, times
        assert set(browser.run("window.seen")) == {"1"}
        browser.until("document.querySelector('#tiles b').textContent === '0'")
        cells = browser.run(
            "[...document.querySelectorAll('#latency tbody tr')].map((row) => row.innerText.split('\\t'))"
        )
        first, whole = cells[0], cells[5]
        assert (first[0], whole[0]) == ("first token", "whole request")
        assert first[4] == whole[4] == "–"  # the 99th percentile needs 100 requests


def test_pictures(start: Start, tmp_path: Path) -> None:
    """Chosen, pasted, dropped, removed, refused; and the model gets them."""
    pictures_.write_checkpoint(tmp_path / "model")
    media = {"limit_mm_per_prompt": {"image": 3}, "media_max_mb": 1, "media_max_pixels": 10_000}
    server = start(tmp_path / "model", vision=pictures_.vision(), max_model_len=4096, media=media)
    small, large, big, other = (tmp_path / name for name in ("small.png", "large.png", "big.bmp", "notes.txt"))
    Image.new("RGB", (64, 64), "red").save(small)
    Image.new("RGB", (200, 100), "blue").save(large)
    Image.new("RGB", (640, 640), "blue").save(big)
    other.write_text("no picture")
    encoded = base64.b64encode(small.read_bytes()).decode()
    event = """(() => {
      const bytes = Uint8Array.from(atob('%s'), (one) => one.charCodeAt(0));
      const data = new DataTransfer();
      data.items.add(new File([bytes], '%s', { type: 'image/png' }));
      %s
    })()"""
    with browsing(tmp_path, server.url, NARROW, 800) as browser:
        serves(browser)
        browser.until("document.getElementById('picture').hidden === false")
        assert "1 MiB" in browser.run("document.getElementById('picture').title")
        browser.choose_files("#picture-file", small)
        browser.until("document.querySelectorAll('#attached img').length === 1")
        assert browser.run("document.querySelector('#attached img').naturalWidth") == 64
        fits(browser)
        browser.run(
            event
            % (
                encoded,
                "pasted.png",
                """document.getElementById('question').dispatchEvent(
          new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }));""",
            )
        )
        browser.until("document.querySelectorAll('#attached img').length === 2")
        browser.run(
            event
            % (
                encoded,
                "dropped.png",
                """
          const about = { dataTransfer: data, bubbles: true, cancelable: true };
          document.body.dispatchEvent(new DragEvent('dragover', about));
          window.over = !document.getElementById('drop').hidden;
          document.body.dispatchEvent(new DragEvent('drop', about));""",
            )
        )
        browser.until("document.querySelectorAll('#attached img').length === 3")
        assert browser.run("window.over && document.getElementById('drop').hidden")
        browser.choose_files("#picture-file", small)
        browser.until("document.getElementById('problem').textContent.includes('may have 3 pictures')")
        for _ in range(2):
            browser.run("document.querySelector('#attached button').click()")
        assert browser.run("[...document.querySelectorAll('#attached img')].map((one) => one.alt)") == ["dropped.png"]
        for path, why in ((other, "not a picture"), (large, "the limit is 0.0 million"), (big, "the limit is 1 MiB")):
            browser.choose_files("#picture-file", path)
            browser.until(f"document.getElementById('problem').textContent.includes('{why}')")
        assert browser.run("document.querySelectorAll('#attached img').length") == 1
        browser.run("document.getElementById('max_tokens').value = '5'")
        answer(browser, "what is it?")
        assert browser.run("document.querySelectorAll('.question img').length") == 1
        (told,) = server.info()["media"]
        assert told["kind"] == "image"
        assert browser.run("document.getElementById('attached').hidden")
        fits(browser)
        browser.run("document.getElementById('new').click()")
        assert browser.run("document.querySelectorAll('.suggestion img').length") == 3
        fits(browser)
        browser.run("document.querySelector('.suggestion').click()")  # brings a picture along
        browser.until("document.querySelectorAll('.question img').length === 1 && " + ANSWERED)


def test_a_model_without_vision_takes_no_pictures(echo: Server, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        assert browser.run("document.getElementById('picture').hidden")
        browser.choose_files("#picture-file", picture)
        browser.until("document.getElementById('problem').textContent === 'fake takes no pictures.'")
        assert browser.run("document.getElementById('attached').hidden")


def test_names_for_screen_readers(echo: Server, tmp_path: Path) -> None:
    """Every control has a name, answers are announced once, and the focus stays in the field."""
    with browsing(tmp_path, echo.url) as browser:
        serves(browser)
        answer(browser, "Say **this**")
        browser.until("document.getElementById('announcement').textContent.includes('Say this')")
        assert browser.run("document.activeElement.id") == "question"
        assert browser.run("document.getElementById('talk').getAttribute('aria-busy')") == "false"
        tree = browser.send("Accessibility.getFullAXTree")["nodes"]
        controls = [
            one for one in tree if one.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "link")
        ]
        assert len(controls) > 10
        assert [one for one in controls if not one.get("ignored") and not one["name"].get("value")] == []
