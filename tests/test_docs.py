"""Commands and code in README and docs run as they are printed (port and interpreter aside)."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
UNISONO = f"{sys.executable} -m unisono"


def shell(command: str, at: Path = ROOT, **options) -> str:
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=at, env=paths, capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if "bin/unisono" in line]


@pytest.mark.parametrize("line", [c for c in COMMANDS if not re.search(" (serve|train-draft) ", c)])
def test_commands(line: str) -> None:
    assert shell(line.replace(".venv/bin/unisono", UNISONO), input="Hello\n").strip()


def training_commands() -> dict[str, str]:
    """Module -> the command of ``training`` as README and docs print it."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    found = [c for page in pages for c in re.findall(r"python -m\s+(training\.[^`\n]+)", page.read_text())]
    return {command.split()[0]: command for command in found}


def test_training_commands_are_named() -> None:
    assert {"training.tiny.train", "training.tiny.evaluate", "training.tiny.heads"} <= set(training_commands())


@pytest.mark.parametrize("module", training_commands())
def test_training_commands(module: str) -> None:
    """The module runs from a checkout and knows every flag that is printed with it."""
    shown = shell(f"{sys.executable} -m {module} --help").partition("\noptions:")[2]
    for flag in re.findall(r"--[\w-]+", training_commands()[module]):
        assert re.search(rf"{flag}(?![\w-])", shown), flag


@pytest.mark.full
def test_train_and_serve_a_draft(tmp_path: Path) -> None:
    """The three commands in order, with less data and time; ``serve``'s flags are given to ``explain``, which ends."""
    page = (ROOT / "docs/guide/train-a-draft.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?train-draft.*?)```", page, re.DOTALL)
    prompts, training, serving = block.replace("--count 2000", "--count 12").splitlines()
    assert "--minutes 30" in training
    lines = [
        prompts.replace(".venv/bin/python", sys.executable),
        training.replace(
            "--minutes 30", "--minutes 5 --steps 1 --batch-tokens 256 --max-tokens 20 --max-model-len 256"
        ),
        serving.replace(" serve ", " explain ") + " --max-model-len 256 --max-num-seqs 2 --json",
    ]
    for line in lines:
        shown = shell(line.replace(".venv/bin/unisono", UNISONO), at=tmp_path)
    assert json.loads(shown)["speculation"]["drafter"] == "eagle3"


OFFLINE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/offline.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", OFFLINE, ids=["LLM", "AsyncLLM"])
def test_offline_page(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


CURLS = [text for kind, text in BLOCKS if kind == "sh" and "curl" in text]


@pytest.mark.parametrize(
    ("model", "says"), [([], "####"), (["tiny-vl", *["--max-num-seqs", "2", "--max-model-len", "512"]], "#### 3")]
)
def test_serve_and_curl(model: list[str], says: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([*UNISONO.split(), "serve", *model, "--port", str(port)], cwd=ROOT)
    try:
        for _ in range(1200):
            time.sleep(0.25)
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
                break
            except OSError:
                continue
        (chat,) = [text for text in CURLS if ("tiny-vl" in text) == bool(model)]
        answer = json.loads(shell(chat.replace(":8000", f":{port}")))
        assert says in answer["choices"][0]["message"]["content"]
        if model:
            (code,) = [text for kind, text in BLOCKS if kind == "python"]
            code = code.replace(":8000", f":{port}")
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert "#### 8" in done.stdout, done.stderr
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_every_file_that_the_docs_name_exists() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in re.findall(r"`((?:unisono|training|tests|docs|benchmarks)/[\w/.-]+)`", text):
            assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_the_makefile_has_what_the_readme_promises() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
