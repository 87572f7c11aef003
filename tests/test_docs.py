"""Commands and code of the README and the docs run as printed (port and interpreter aside); generated parts are
current; links, paths and the site hold together."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forks import PROGRAMS, SERVERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
README = (ROOT / "README.md").read_text()
STARTED = (ROOT / "docs/getting-started.md").read_text()
UNISONO = f"{sys.executable} -m unisono"


def blocks(text: str, kind: str) -> list[str]:
    """The code blocks of a language."""
    return [code for name, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL) if name == kind]


def commands(text: str) -> list[str]:
    """The commands of a page that call ``.venv/bin/unisono`` or a benchmark; one may have several lines in quotes."""
    found, held = [], ""
    for line in "\n".join(blocks(text, "sh")).splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            shlex.split(held)
        except ValueError:
            continue
        found.append(held)
        held = ""
    return [one for one in found if one.startswith((".venv/bin/unisono ", ".venv/bin/python -m benchmarks."))]


def shell(command: str, at: Path = ROOT, **options: Any) -> str:
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=at, env=paths, capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


QUICK = commands(README) + [one for one in commands(STARTED) if one not in commands(README)]
LONG = {one: page.stem for page in PAGES for one in commands(page.read_text()) if one not in QUICK}
ENDS = r" (serve|train-draft) "
"""Commands that these tests do not run: the one does not end, the other has a test of its own."""


@pytest.mark.parametrize(
    "command",
    [c for c in QUICK if not re.search(ENDS, c)]
    + [pytest.param(c, marks=pytest.mark.full) for c in LONG if not re.search(ENDS, c)],
)
def test_commands(command: str) -> None:
    program, *words = shlex.split(command)
    if program.endswith("unisono"):
        words[:0] = ["-m", "unisono"]
    done = PROGRAMS.finished(*words, text="Hello\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_flags_of_servers_exist() -> None:
    """Commands that serve are not run, but their flags are known."""
    from unisono.cli.aliases import ALIASES
    from unisono.cli.main import app

    command = __import__("typer").main.get_command(app).commands["serve"]
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | set(ALIASES)
    for page in PAGES:
        for block in blocks(page.read_text(), "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(\.venv/bin/)?unisono serve ", line):
                    for flag in re.findall(r"(?<= )--[\w-]+", line):
                        assert flag in known, f"{page.name}: {flag}"


# ---- python -----------------------------------------------------------------------------------------

PYTHON = [
    (page, code)
    for page in ("README.md", "docs/getting-started.md", "docs/guide/offline.md", "docs/guide/structure.md")
    for code in blocks((ROOT / page).read_text(), "python")
]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=lambda v: v if v.endswith(".md") else "code")
def test_python(page: str, code: str) -> None:
    done = PROGRAMS.finished("-c", code, lazy=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


# ---- training ---------------------------------------------------------------------------------------


def training_commands() -> dict[str, str]:
    """Module -> the command of ``training`` as the pages print it."""
    found = [c for page in PAGES for c in re.findall(r"python -m\s+(training\.[^`\n]+)", page.read_text())]
    return {command.split()[0]: command for command in found}


def test_training_commands_are_named() -> None:
    assert {"training.tiny.train", "training.tiny.evaluate", "training.tiny.heads"} <= set(training_commands())


HELP = """
import contextlib, io, json, runpy, sys
shown = {}
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    shown[module] = text.getvalue()
print(json.dumps(shown))
"""
"""Prints the help of each of these modules; one process, since torch takes longer to import than they take to run."""


@pytest.fixture(scope="module")
def training_help() -> dict[str, str]:
    done = PROGRAMS.finished("-c", HELP, *training_commands())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", training_commands())
def test_training_commands(module: str, training_help: dict[str, str]) -> None:
    """The module runs from a checkout and knows every flag that is printed with it."""
    shown = training_help[module].partition("\noptions:")[2]
    for flag in re.findall(r"--[\w-]+", training_commands()[module]):
        assert re.search(rf"{flag}(?![\w-])", shown), flag


@pytest.mark.full
def test_train_and_serve_a_draft(tmp_path: Path) -> None:
    """The three commands in order, with less data and time; ``explain`` takes the flags of ``serve``, and ends."""
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


# ---- servers ----------------------------------------------------------------------------------------

SMALL = ["tiny-vl", "--max-num-seqs", "2", "--max-model-len", "512"]


@pytest.mark.parametrize(
    ("page", "flags", "says"), [("README.md", ["tiny"], "####"), ("docs/guide/images.md", SMALL, "#### 3")]
)
def test_serve_and_curl(page: str, flags: list[str], says: str) -> None:
    """The page's curl command, and below it the page's code for openai's client."""
    text = (ROOT / page).read_text()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["-m", "unisono", "serve", *flags, "--port", str(port)]
    server = SERVERS.python(*command, log=2, environment=os.environ)
    try:
        for _ in range(3000):
            time.sleep(0.1)
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
                break
            except OSError:
                continue
        (chat,) = [block for block in blocks(text, "sh") if "curl" in block]
        answer = json.loads(shell(chat.replace(":8000", f":{port}")))
        assert says in answer["choices"][0]["message"]["content"]
        for code in (code for code in blocks(text, "python") if "openai" in code):
            code = code.replace(":8000", f":{port}")
            done = PROGRAMS.finished("-c", code)
            assert "#### 8" in done.stdout, done.stderr
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_the_readmes_request_is_that_of_getting_started() -> None:
    (request,) = [block for block in blocks(README, "sh") if "curl" in block]
    assert request in blocks(STARTED, "sh")


# ---- generated parts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Any:
    """scripts/reference.py as a module."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "part",
    [
        "flags",
        "aliases",
        "fields",
        "limits",
        "parameters",
        "environment",
        "others",
        "formats",
        "structured",
        "families",
        "matrix",
        "pairs",
    ],
)
def test_generated_parts_are_current(part: str, reference: Any) -> None:
    """`make reference` writes them."""
    assert reference.PARTS[part][1]() == reference.current(part), f"run: python scripts/reference.py {part}"


@pytest.mark.full
def test_the_metrics_page_is_current(reference: Any) -> None:
    assert reference.metrics() == reference.current("metrics"), "run: python scripts/reference.py metrics"


def test_every_part_is_compared(reference: Any) -> None:
    text = Path(__file__).read_text()
    assert all(part in text for part in reference.PARTS)


def test_metrics_of_the_server_are_listed(reference: Any) -> None:
    """Those that the API process declares; the full test compares all."""
    from unisono.http.observability.metrics import LENGTHS, SECONDS

    page = reference.current("metrics")
    assert all(f"| `{name}` | histogram |" in page for name in (*SECONDS, *LENGTHS))


# ---- links, paths, the site -------------------------------------------------------------------------


def test_every_file_that_the_pages_name_exists() -> None:
    for page in [*PAGES, *(ROOT / "examples").glob("*.md"), ROOT / "SECURITY.md"]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        if page.name != "CHANGELOG.md":
            for target in re.findall(r"`((?:unisono|training|tests|docs|benchmarks|examples|scripts)/[\w/.-]+)`", text):
                assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_every_page_that_the_code_names_exists() -> None:
    """In docstrings, help texts and errors."""
    for folder in ("unisono", "tests", "packaging", "scripts"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".service", ".sh") and file != Path(__file__):
                for target in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", file.read_text()):
                    assert (ROOT / target).exists(), f"{file.relative_to(ROOT)} names {target}"


def test_the_rooms_are_those_of_the_architecture_page() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text()
    table = page.partition("| Room |")[2].partition("Table:")[0]
    rooms = {path.name for path in (ROOT / "unisono").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == rooms
    for target in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page):
        inside = (ROOT / "unisono" / target).exists() or (ROOT / target).exists()
        assert inside, f"the page names {target}"


def test_the_commands_are_those_of_the_architecture_page() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text().partition("## Commands")[2].partition("## Ranks")[0]
    named = set(re.findall(r"`([A-Z]\w+)(?:\([^)]*\))?`", page.partition("Table:")[0]))
    files = ("engine/worker/commands.py", "graphs/graph_set.py", "models/lora/host_adapters.py")
    text = "".join((ROOT / "unisono" / file).read_text() for file in files)
    declared = set(re.findall(r"^class (\w+)\(msgspec\.Struct", text, re.MULTILINE)) - {"FileOutcomes"}  # a question
    assert named == declared


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/getting-started.md"])
def test_make_targets_of_the_pages_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", (ROOT / page).read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_workflows_and_hooks_run_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    files = [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(files) == 4
    for file in files:
        assert yaml.safe_load(file.read_text())
        for target in re.findall(r"make ([a-z-]+)", file.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{file.name}: {target}"
        for script in re.findall(r"scripts/\w+\.py", file.read_text()):
            assert (ROOT / script).exists(), f"{file.name}: {script}"


def test_the_site_has_every_page() -> None:
    nav = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert nav == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    shell(f"{sys.executable} -m mkdocs build --strict --quiet --site-dir {tmp_path}")
    assert (tmp_path / "getting-started/index.html").exists()
    assert "generate" in (tmp_path / "reference/python/index.html").read_text()
