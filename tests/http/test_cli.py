"""The command line with the bundled model: what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.http.conftest import ROOT
from unisono import __version__
from unisono.cli.main import app
from unisono.console import output as cli_output
from unisono.console.output import print_tables

FAST = ["--max-num-seqs", "1", "--max-model-len", "512", "--max-num-batched-tokens", "64", "--device", "cpu"]
PROMPT = "Tom has 3 apples. "
QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_version() -> None:
    assert run("--version").output == f"unisono {__version__}\n"


def test_help_needs_no_torch() -> None:
    """The command line answers at once: what is slow to import waits for the command that needs it."""
    code = "import sys, unisono.cli.main\n"
    code += "print([m for m in ('torch', 'transformers', 'fastapi', 'zmq') if m in sys.modules])"
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
        (["serve", "tiny-hybrid", "--speculative-method", "nope"], 2, "'nope': unknown drafter. Supported: combined"),
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


def test_serve_reports_load_errors_of_the_engine_process(tmp_path: Path) -> None:
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
    seed = first.stderr.split("--seed ")[1].split()[0]
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
    shown = run("bench", "latency", "--batchh", "3")
    assert (shown.exit_code, shown.output.count("\n")) == (2, 1)
    assert "--batch)" in shown.output
    assert "unisono bench latency --help" in shown.output.replace("root", "unisono")


# ---- help and completion --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["exact", "latency", "serve", "throughput"])
def test_benches_have_help(command: str) -> None:
    assert "--model" in page(80, "bench", command, "--help=all")
    assert "Usage" in page(80, "bench", command, "--help")


def page(width: int, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
STARTING = ("serve", "generate", "chat", "explain", "eval")


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("command", [*STARTING, "compare"])
def test_every_name_is_whole_at_any_width(command: str, width: int) -> None:
    lines = page(width, command, "--help=all" if command in STARTING else "--help").splitlines()
    words = {word.strip(",") for line in lines for word in line.split()}
    names = [name for option in COMMANDS[command].params for name in option.opts if name.startswith("--")]
    assert len(names) > 8
    assert set(names) <= words
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("command", STARTING)
def test_help_is_short_and_every_flag_has_a_group(command: str) -> None:
    shown = page(80, command, "--help")
    assert len(shown.splitlines()) < 90
    names = {option.opts[0] for option in COMMANDS[command].params if option.opts[0].startswith("--")}
    groups = page(80, command, "--help=listgroup").split()
    assert "general" not in groups, "cli_help.GROUPS names every flag"
    in_groups = [re.findall(r"^  (--[\w-]+)", page(80, command, f"--help={group}"), re.MULTILINE) for group in groups]
    found = [name for group in in_groups for name in group]
    assert sorted(found) == sorted(names), "each flag is in one group"
    assert all(group in shown for group in groups)
    assert "--help=GROUP" in shown


def test_help_finds_flags() -> None:
    def found(topic: str) -> list[str]:
        return re.findall(r"^  (--[\w-]+)", page(100, "serve", f"--help={topic}"), re.MULTILINE)

    assert found("--max-num-seqs") == found("max-num-seqs") == found("max_num_seqs") == ["--max-num-seqs"]
    assert found("mem-fraction-static") == ["--gpu-memory-utilization"], "SGLang's name"
    assert found("CacheConfig") == found("memory"), "vLLM's group"
    assert {"--max-num-seqs", "--max-loras", "--max-queued-requests"} <= set(found("max"))
    assert "--served-model-name" in found("model name"), "a word of the description"
    assert found("memory") == re.findall(r"^  (--[\w-]+)", page(100, "serve", "--help", "memory"), re.MULTILINE)
    wrong = run("serve", "--help=tokenzier")
    assert (wrong.exit_code, wrong.output.count("\n")) == (2, 1)
    assert "tokenizer" in wrong.output


def test_bash_completes_commands_flags_and_values(tmp_path: Path) -> None:
    """As a user has it: bash evaluates what --show-completion prints, and calls the function that it defines."""
    unisono = tmp_path / "unisono"
    code = "from unisono.cli.main import app; app(prog_name='unisono')"
    unisono.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    unisono.chmod(0o755)
    lines = ["gen", "serve --gpu-m", "generate tiny --dtype b", "chat t", "bench lat", "bench latency --prompt"]
    script = 'eval "$(unisono --show-completion bash)"\n'
    for line in lines:
        script += f"COMP_WORDS=(unisono {line}); COMP_CWORD={len(line.split())}; COMPREPLY=()\n"
        script += '_unisono_completion unisono; echo "${COMPREPLY[*]}"\n'
    paths = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=paths, timeout=120, check=True)
    shown = [line.split() for line in done.stdout.splitlines()]
    assert shown[:3] == [["generate"], ["--gpu-memory-utilization"], ["bfloat16"]]
    assert sorted(shown[3]) == ["tiny", "tiny-gemma", "tiny-hybrid", "tiny-vl"], "models; no heads"
    assert shown[4:] == [["latency"], ["--prompts"]], done.stdout


@pytest.mark.parametrize(
    "command", ["serve --help=all", "--version", "explain tiny --dry-run", "explain tiny --dry-run --json"]
)
def test_a_closed_pipe_ends_a_command_in_silence(command: str) -> None:
    """No process reads the buffered output, as after ``| head -1``. An open pipe would hold all of a short output."""
    read, write = os.pipe()
    os.close(read)
    arguments = [sys.executable, "-m", "unisono", *command.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(write, "wb") as output:
        done = subprocess.run(
            arguments, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_tables_keep_to_the_width(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(cli_output, "stdout", Console())  # made where COLUMNS is set, as in a process of its own
    reason = "the CPU computes in float32; the checkpoint holds bfloat16, which has no fast products there"
    rows = {"decisions": [{"name": "dtype", "value": "float32", "reason": reason}], "experts": [], "graphs": []}
    info = {"settings": {"model": "tiny"}, "graph_memory": {"graphs": 3}, "speculation": {"round_ms": []}, **rows}
    print_tables(info)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert " ".join(reason.split()[:3]) in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["servve"], "No such command 'servve'. Did you mean 'serve'? See"),
        (["bench", "latncy"], "No such command 'latncy'. Did you mean 'latency'? See"),
        (["serve", "--port"], "requires an argument. See"),
        (["serve", "a", "b"], "extra argument(s) (b). See"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert says in result.output
    assert ".." not in result.output
    assert "?." not in result.output
