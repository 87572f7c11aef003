"""``unisono bench throughput``: the load runs whole, with and without speculation, and the stall is measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.cli.main import app

SMALL = ["--max-model-len", "96", "--max-num-seqs", "3", "--enforce-eager"]


def bench(*arguments: object):
    return CliRunner().invoke(app, ["bench", "throughput", *SMALL, *map(str, arguments)])


def test_with_and_without_speculation(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    spec = '{"method": "ngram", "num_speculative_tokens": 3}'
    load = ["--num-prompts", 4, "--input-len", "4:12", "--output-len", 6, "--repeats", 2, "--max-concurrency", 3]
    shown = bench(*load, "--speculative-config", spec, "--out", out)
    assert shown.exit_code == 0, shown.output
    data = json.loads(out.read_text())
    assert [run["speculative"] for run in data["runs"]] == ["none", spec]
    for run in data["runs"]:
        assert len(run["passes"]) == 2
        for one in run["passes"]:
            assert (one["requests"], one["output_tokens"]) == (4, 24)
            assert 16 <= one["input_tokens"] <= 48
            assert (one["accept_length"] is None) == (run["speculative"] == "none")
        assert run["settings"]["max_num_seqs"] == 3
    assert "times the output tokens/s (medians)" in shown.stdout
    assert shown.stdout.count("The first run has") == 2
    assert len(re.findall(r"^Passes: \d+ \w+ \(eager: DISABLED\), ", shown.stdout, re.MULTILINE)) == 2


def test_a_file_of_chats_and_texts(tmp_path: Path) -> None:
    path, out = tmp_path / "data.jsonl", tmp_path / "out.json"
    path.write_text(
        '{"prompt": "def add(a, b):", "output_len": 4}\n{"messages": [{"role": "user", "content": "Hi"}]}\n'
    )
    flags = ["--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 2, "--custom-output-len", 6]
    shown = bench(*flags, "--repeats", 1, "--out", out)
    assert shown.exit_code == 0, shown.output
    (one,) = json.loads(out.read_text())["runs"][0]["passes"]
    assert one["output_tokens"] == 10


def test_the_stall_of_this_engine(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    scene = ["--streams", 2, "--prompts", "1", "--prompt-len", 64, "--stream-input-len", 8, "--stream-output-len", 80]
    shown = bench("--scenario", "stall", *scene, "--out", out)
    assert shown.exit_code == 0, shown.output
    (one,) = json.loads(out.read_text())["runs"][0]["stalls"]
    assert one["largest_gap_ms"] >= one["median_gap_ms"] > 0
    assert one["prompt_tokens_per_s"] > 0
    assert sorted(one["passes"].split(", ")) == ["1 extend (eager: DISABLED)", "1 round (eager: DISABLED)"]
    assert one["passes"] in shown.output
    assert one["mean_ttft_ms"] >= 1e3 * 64 / one["prompt_tokens_per_s"] * 0.99


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input-len", 200], "a prompt of 200 tokens: the engine's context is 96"),
        (["--scenario", "stall", "--streams", 3], "are 11 requests at once; --max-num-seqs is 3"),
        (["--synthetic-acceptance-length", 2], "needs --speculative-config"),
        (["--out", "/no/such/x"], "the directory /no/such does not exist"),
        (["--model", "/no/such"], "/no/such does not exist"),
        (["--dataset-name", "conversation", "--token-ids"], "--token-ids"),
    ],
)
def test_infeasible_benchmark_flags_are_refused(arguments: list[object], says: str) -> None:
    scene = ["--prompt-len", 40, "--stream-input-len", 8, "--stream-output-len", 40]
    shown = bench("--num-prompts", 1, *scene, *arguments)
    assert shown.exit_code == (1 if "--model" in arguments else 2)
    assert says in shown.output
    assert "Traceback" not in shown.output


def test_tokenizer_and_overrides_reach_the_checks_and_the_engine(tmp_path: Path) -> None:
    one = ["--num-prompts", 1, "--input-len", 4, "--output-len", 2, "--repeats", 1]
    refused = bench(*one, "--hf-overrides", '{"num_attention_heads": 3}')
    assert "num_kv_heads=2: it must divide 3 heads" in refused.output, "the checks have the overrides"
    longer = bench(*one, "--hf-overrides", '{"max_position_embeddings": 80}')
    assert longer.exit_code
    assert "80" in longer.output, "the engine has the overrides"
    absent = bench(*one, "--tokenizer", tmp_path / "absent")
    assert absent.exit_code
    assert str(tmp_path / "absent") in absent.output
