"""Builds the wheel, installs it in a fresh environment, and serves from it: ``python scripts/check_wheel.py``.

Run it with the interpreter of an environment that has Unisono's dependencies and setuptools: the fresh environment
reads them from there, so nothing is downloaded. The package itself comes from the wheel alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Mia earns $12 an hour and works 5 hours a day for 3 days. She spends $45 on a gift. How much has she left?"


SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "unisono")


def build(into: Path) -> Path:
    """The wheel, built without a network from a copy: what earlier builds left in the checkout does not get in."""
    copied = into / "source"
    for name in SOURCES:
        kept = ROOT / name
        if kept.is_dir():
            shutil.copytree(kept, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copied.mkdir(exist_ok=True)
            shutil.copy(kept, copied / name)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", str(into), str(copied)], check=True)
    (wheel,) = into.glob("unisono-*.whl")
    return wheel


def install(wheel: Path, home: Path) -> Path:
    """A fresh environment with the wheel, then this interpreter's packages. Returns its bin directory."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files do not count
    return home / "bin"


def serve(bin_: Path, at: Path) -> None:
    """Serve the bundled model from there, ask it once, and stop it. Raises SystemExit for what goes wrong."""
    log = at / "log"
    command = [str(bin_ / "unisono"), "serve", "--port", "0", "--device", "cpu", "--max-num-seqs", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as stream:
        server = subprocess.Popen(command, cwd=at, env=environment, stdout=stream, stderr=stream)
    try:
        url = _wait(server, log)
        body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
        page = urllib.request.urlopen(f"{url}/", timeout=10).read()
        _require("####" in answer, f"the answer is odd: {answer}")
        _require(b"<html" in page, "there is no page at /")
        server.terminate()
        _require(server.wait(60) == 0, f"the server ended with {server.returncode}:\n{log.read_text()}")
    finally:
        server.kill()


def _wait(server: subprocess.Popen[bytes], log: Path, limit: float = 180.0) -> str:
    end = time.monotonic() + limit
    while (match := re.search(r"Serving .* on (http://\S+)/v1", log.read_text())) is None:
        _require(server.poll() is None and time.monotonic() < end, f"the server did not start:\n{log.read_text()}")
        time.sleep(0.1)
    return match[1]


def _require(ok: bool, why: str) -> None:
    if not ok:
        raise SystemExit(f"check_wheel: {why}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as name:
        at = Path(name)
        wheel = build(at)
        bin_ = install(wheel, at / "venv")
        code = "import unisono; print(unisono.__file__)"
        found = subprocess.run([bin_ / "python", "-c", code], cwd=at, check=True, capture_output=True, text=True).stdout
        _require(found.startswith(str(at)), f"unisono is imported from {found}, not from the wheel")
        version = subprocess.run(
            [bin_ / "python", "-m", "unisono", "--version"], cwd=at, check=True, capture_output=True, text=True
        ).stdout
        serve(bin_, at)
        print(f"check_wheel: {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB): {version.strip()} serves from it")


if __name__ == "__main__":
    main()
