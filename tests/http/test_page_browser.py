"""The page in a headless Chromium: the chat, pictures, errors and the numbers."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from tests.http import pictures_, tokenizers_
from tests.http.browsing import ANSWERED, CHAT, NARROW, answer, ask, browsing, fits, serves, text_of
from tests.http.chromium import installed
from tests.http.conftest import ECHO, Server, Start, serving, until

pytestmark = [pytest.mark.full, pytest.mark.skipif(installed() is None, reason="there is no Chromium")]

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
