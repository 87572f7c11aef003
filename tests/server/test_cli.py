"""The command line with the bundled model: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.server.conftest import ROOT
from unisono import __version__
from unisono.cli import app

FAST = ["--max-num-seqs", "1", "--max-model-len", "512", "--max-num-batched-tokens", "64", "--device", "cpu"]
PROMPT = "Tom has 3 apples. "
QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_version() -> None:
    assert run("--version").output == f"unisono {__version__}\n"


def test_help_needs_no_torch() -> None:
    """The command line answers at once: what is slow to import waits for the command that needs it."""
    code = (
        "import sys, unisono.cli; print([m for m in ('torch', 'transformers', 'fastapi', 'zmq') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["generate", "--temperature", "-1"], 2, "between 0 and 100"),
        (["generate", "--top-p", "x"], 2, "--top-p"),
        (["serve", "--dtype", "int3"], 2, "'int3'"),
        (["serve", "--port", "70000"], 2, "65535"),
        (["serve", "--max-num-seqs", "0"], 2, "--max-num-seqs 0"),
        (["explain", "--max-model-len", "9999999"], 2, "9999999"),
        (["explain", "--attention-backend", "none"], 2, "Supported: "),
        (["nonsense"], 2, "nonsense"),
        (["serve", "tiny-hybrid", "--quantization", "nonsense"], 2, "'nonsense': unknown weight format"),
        (["explain", "tiny-hybrid", "--quantization", "awq"], 2, "only fp8 is made while loading"),
        (["serve", "tiny-hybrid", "--reasoning-parser", "nope"], 2, "'nope' is unknown; choose one of qwen3"),
        (["serve", "tiny-hybrid", "--speculative-method", "nope"], 2, "'nope': unknown drafter. Supported: eagle"),
        (["serve", "tiny-hybrid", "--speculative-num-steps", "0"], 2, "--speculative-method none drafts nothing"),
        (["explain", "tiny", "--speculative-method", "mtp"], 1, "has no MTP modules"),
        (["generate", "no/such/dir", "--prompt", "a"], 1, "no/such/dir"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_a_status(arguments: list[str], status: int, says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert says in result.output
    assert "Traceback" not in result.output


def test_serve_reports_what_the_engine_process_could_not_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ParrotForCausalLM"]}')
    command = [sys.executable, "-m", "unisono", "serve", str(tmp_path), "--port", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "ParrotForCausalLM" in result.stderr
    assert "Qwen3ForCausalLM" in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_repeats_with_its_seed() -> None:
    flags = ["--max-tokens", "24", "--temperature", "1", *FAST]
    first = run("generate", "tiny", "--prompt", PROMPT, *flags)
    assert first.exit_code == 0, first.output
    seed = first.stderr.split("seed ")[1].strip()
    assert run("generate", *flags, "--seed", seed, stdin=PROMPT).stdout == first.stdout
    assert len(first.stdout) > 10
    assert "Loading the model" in first.stderr
    assert "Capturing graphs" not in first.stderr, "a command of one request captures what it replays"


def test_chat_with_piped_input() -> None:
    result = run("chat", "tiny", "--temperature", "0", *FAST, stdin=f"{QUESTION}\n\nhello\n/exit\nnever read\n")
    assert result.exit_code == 0, result.output
    assert "####" in result.stdout
    assert "never" not in result.stdout
    alone = run("chat", "tiny", "--temperature", "0", *FAST, stdin="hello\n").stdout
    assert result.stdout.endswith(alone)


def test_chat_survives_a_message_that_is_too_long() -> None:
    result = run("chat", "tiny", "--temperature", "0", *FAST, stdin=f"{'word ' * 600}\n{QUESTION}\n")
    assert result.exit_code == 0, result.output
    assert "--max-model-len" in result.stderr
    assert "####" in result.stdout


def test_explain() -> None:
    info = json.loads(run("explain", "tiny", "--json", *FAST).stdout)
    assert info["settings"]["max_model_len"] == 512
    assert {"name", "value", "reason"} <= set(info["decisions"][0])
    text = run("explain", "tiny", *FAST).stdout
    for part in ("Settings", "Decisions", "Passes", "round", "extend"):
        assert part in text


def test_bench_passes_its_arguments_on() -> None:
    assert "latency" in run("bench", "--help").output
