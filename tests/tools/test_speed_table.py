"""The speed table (``python -m benchmarks.speed``): figures from the JSON of its commands, ratios, what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import speed


def cells(out: Path, name: str) -> list[str]:
    return [cell.strip() for cell in speed.table([name], out).splitlines()[-1].strip("|").split("|")][1:]


def write(out: Path, name: str, found: Any) -> None:
    (out / f"{name}.json").write_text(json.dumps(found))


def test_times_are_divided_by_ours_and_rates_by_theirs(tmp_path: Path) -> None:
    write(tmp_path, "decode", {"step_ms": {"1": 4.0, "4": 4.0, "16": 4.0, "64": 8.0}})
    assert cells(tmp_path, "decode") == [
        "4/4/4/8", "4.05/4.15/4.75/6.9", "5.22/5.39/5.92/8.15", "1.305/1.347/1.48/1.019",
    ]  # fmt: skip
    runs = [{"output_tokens": tokens, "seconds": 2.0} for tokens in (1, 20000, 24000)]
    write(tmp_path, "mixed", {"runs": [{"passes": runs}]})
    assert cells(tmp_path, "mixed") == ["11,000", "6,700", "5,953", "1.848"]


def test_first_tokens_stalls_ranks_and_starts(tmp_path: Path) -> None:
    write(tmp_path, "moe-ttft", {"ttft_ms": {"2048": 25.0, "8192": 97.5}})
    assert cells(tmp_path, "moe-ttft") == ["25/97.5", "22/80", "–/195", "–/2"]
    stall = {"largest_gap_ms": 45.4, "prompt_tokens_per_s": 95.0, "prompt_tokens_per_s_alone": 100.0}
    write(tmp_path, "stall", {"runs": [{"stalls": [stall]}]})
    assert cells(tmp_path, "stall") == ["45.4/0.95", "50/0.96", "227/1", "5/0.95"]
    write(tmp_path, "four-gpus", {"8b": {"4": {"step_ms": {"1": 2.0, "4": 2.0, "16": 2.0, "64": 3.0}}}})
    assert cells(tmp_path, "four-gpus")[0] == "2/2/2/3"
    write(tmp_path, "two-gpus", {"8b": {"2": {"left out": "110 s are over"}}})
    assert cells(tmp_path, "two-gpus")[0] == "–"
    write(tmp_path, "start", {"start_seconds": {"import": 3.0, "total": 9.0}})
    assert cells(tmp_path, "start") == ["12", "10", "103", "8.583"]


def test_a_row_without_a_result_shows_its_bar(tmp_path: Path) -> None:
    assert cells(tmp_path, "hybrid-ttft") == ["–", "190", "216", "–"]
