"""Drives a headless Chromium over its debugging pipe: no package, no port. For the tests of the page."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def installed() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. dark: what prefers-color-scheme says."""

    def __init__(self, directory: Path, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        path = installed()
        assert path is not None
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()

        def pipes() -> None:
            for copy, end in ((13, read), (14, write)):
                os.dup2(end, copy)
            os.dup2(13, 3)
            os.dup2(14, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
                 "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--remote-debugging-pipe", f"--user-data-dir={directory}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            [path, *flags], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._numbers, self._rest = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are kept in ``events``."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, found["error"]
                return found["result"]
            self.events.append(found)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.getElementById('state') !== null")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str, limit: float = 60) -> None:
        end = time.monotonic() + limit
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"it did not happen: {condition}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def enter(self) -> None:
        self.press("Enter", 13, "\r")

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files in a file input."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from, 1 << 16)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
