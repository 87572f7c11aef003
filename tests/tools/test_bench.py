"""``unisono bench``: what cannot run is said before anything is measured, and what is printed was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.adaptive import adaptive
from benchmarks.command import run
from benchmarks.drafters import drafters
from benchmarks.plot_adaptive import plot
from unisono.cli.main import app

SMALL = ["latency", "--enforce-eager", "--output-len", "32"]


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("latency --batch a,b", "--batch 'a,b': give whole numbers"),
        ("latency --batch 0", "--batch '0': give whole numbers from 1 on"),
        ("latency --prompts 1.5", "--prompts '1.5': give whole numbers"),
        ("latency --repeats x", "--repeats x: give a whole number"),
        ("latency --output-len 2", "--output-len"),
        ("latency --speculative-config {", "--speculative-config is not valid JSON"),
        ("latency --speculative-config []", "give a JSON object"),
        ('latency --speculative-config {"method":"psychic"}', "'psychic': unknown drafter"),
        ("latency --synthetic-acceptance-length 2", "needs --speculative-config"),
        ("latency --out /no/such/report.json", "the directory /no/such does not exist"),
        ("latency --out /", "is a directory; give a file"),
        ("latency --model /no/such", "/no/such does not exist"),
        ("latency --profile", "no GPU is visible"),
        ("exact --requests 0", "--requests"),
        ("exact --speculative-config {", "--speculative-config is not valid JSON"),
        ("nonsense", "nonsense"),
    ],
)
def test_wrong_flags_are_one_line_before_anything_runs(arguments: str, says: str) -> None:
    result = bench(*arguments.split(" "))
    assert result.exit_code in (1, 2)
    assert says in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) <= 3  # the stages of a start, and the error


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        (adaptive, "--speculative-config {", "--speculative-config is not valid JSON"),
        (adaptive, '--speculative-config {"method":"ngram"} --concurrency many', "--concurrency 'many'"),
        (
            adaptive,
            '--speculative-config {"method":"ngram"} --synthetic-acceptance-rates x',
            "give shares from 0 to 1",
        ),
        (
            adaptive,
            '--speculative-config {"method":"ngram"} --out /no/such/x',
            "the directory /no/such does not exist",
        ),
        (adaptive, '--model /no/such --speculative-config {"method":"ngram"}', "/no/such does not exist"),
        (adaptive, "", "--speculative-config"),
        (drafters, "--methods ngram,psychic", "--methods 'psychic' is unknown; choose from ngram"),
        (drafters, "--batch ,", "--batch ',': give whole numbers"),
        (plot, "/no/such.json /tmp/x.png", "/no/such.json"),
    ],
)
def test_wrong_flags_of_developers_benchmarks(
    command: Callable[..., None], arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, arguments.split())
    assert ended.value.code in (1, 2)
    shown = capsys.readouterr().err
    assert says in shown
    assert len(shown.strip().splitlines()) == 1


def test_bench_latency_skips_infeasible_cases(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = bench(*SMALL, "--max-num-seqs", "2", "--max-model-len", "200", "--repeats", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert list(report["step_ms"]) == ["1"]
    assert list(report["ttft_ms"]) == ["128"]
    assert (report["context"], report["output_len"], report["repeats"]) == (168, 32, 1)
    assert report["rounds"]["1"] >= 8
    assert report["settings"]["max_num_seqs"] == 2
    assert "Each request: 168 random tokens in, up to 32 out" in result.stdout
    for missing in ("a context of 1024", "batch 4 (--max-num-seqs is 2)", "a prompt of 512 (the engine's context is"):
        assert missing in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "1", "--max-model-len", "64", "--context", "40"], "--context 40 and --output-len 32 are more"),
        (["--batch", "4", "--max-model-len", "64", "--max-num-seqs", "2"], "--batch 4: --max-num-seqs is 2"),
        (["--batch", "", "--max-model-len", "64", "--prompts", "8,2048"], "--prompts 2048: the engine's context is 64"),
    ],
)
def test_bench_latency_refuses_infeasible_flags(arguments: list[str], says: str) -> None:
    result = bench(*SMALL, *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert "ms/step" not in result.output


def test_bench_exact_reports_untested_modes() -> None:
    result = bench("exact", "--requests", "1", "--max-prompt", "20", "--output-len", "4")
    assert result.exit_code == 1
    assert "preempted                NOT TESTED: 0 preemptions" in result.output
    assert "batched                  NOT TESTED" in result.output
    assert "FAILED: not tested: batched" in result.output


@pytest.mark.parametrize(("model", "requests", "prompt", "tokens"), [("tiny", 8, 60, 18), ("tiny-hybrid", 4, 100, 10)])
def test_bench_exact_reports_counts_per_mode(model: str, requests: int, prompt: int, tokens: int) -> None:
    """Outputs that grow by a page at most are preempted, too, though admission leaves a page for each."""
    sizes = "--requests", str(requests), "--max-prompt", str(prompt), "--output-len", str(tokens), "--chunk", "16"
    result = bench("exact", "--model", model, *sizes)
    assert result.exit_code == 0, result.output
    for mode in ("batched", "in chunks of 16", "after a prefix hit", "preempted", "without graphs"):
        (line,) = [line for line in result.output.splitlines() if line.startswith(mode)]
        assert f"0 of {requests} differ, " in line
        assert int(line.split("differ, ")[1].split()[0]) > 0
