"""Answers of a model on the page, in a headless Chromium: hostile output, Markdown, and marks of drafted tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.http.browsing import CHAT, NARROW, answer, browsing, fits, serves, text_of
from tests.http.chromium import installed
from tests.http.conftest import Server

pytestmark = [pytest.mark.full, pytest.mark.skipif(installed() is None, reason="there is no Chromium")]

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
