"""The page in a headless Chromium: a server that repeats its prompt, and what tests do on the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.http.chromium import Browser

CHAT = "/v1/chat/completions"
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
