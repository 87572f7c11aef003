"""The speed table (``python -m benchmarks.speed``): figures from the JSON of its commands, ratios, what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    write(tmp_path, "moe", {"step_ms": {}, "ttft_ms": {"2048": 25.0, "8192": 97.5}})
    assert cells(tmp_path, "moe-ttft") == ["25/97.5", "22/80", "–/195", "–/2"]
    stall = {"largest_gap_ms": 45.4, "prompt_tokens_per_s": 95.0, "prompt_tokens_per_s_alone": 100.0}
    write(tmp_path, "stall", {"runs": [{"stalls": [stall]}]})
    assert cells(tmp_path, "stall") == ["45.4/0.95", "50/0.96", "227/1", "5/0.95"]
    write(tmp_path, "four-gpus", {"8b": {"4": {"step_ms": {"1": 2.0, "4": 2.0, "16": 2.0, "64": 3.0}}}})
    assert cells(tmp_path, "four-gpus")[0] == "2/2/2/3"
    write(tmp_path, "two-gpus", {"8b": {"2": {"left out": "110 s are over"}}})
    assert cells(tmp_path, "two-gpus")[0] == "–"
    write(tmp_path, "decode", {"start_seconds": {"import": 3.0, "total": 9.0}})
    assert cells(tmp_path, "start") == ["12", "10", "103", "8.583"]


@pytest.mark.parametrize("text", ["", '{"step_ms": {}}', '{"ttft_ms": {"8192": 1'])
def test_a_row_without_a_result_shows_its_bar(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "hybrid.json").write_text(text)
    assert cells(tmp_path, "hybrid-ttft") == ["–", "190", "216", "–"]


COMMAND = """
import json, os, subprocess, sys, time
name, what, out = sys.argv[1], sys.argv[2], sys.argv[4]
gpus, cache = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TRITON_CACHE_DIR"]
if what == "hangs":
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
    time.sleep(60)
if what == "fails":
    sys.exit("no such device")
kept = os.path.exists(cache)
os.makedirs(cache, exist_ok=True)
open("order", "a").write(name + "\\n")
json.dump({"gpus": gpus, "kept": kept}, open(out, "w"))
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the table's rows by commands that need no GPU."""
    (tmp_path / "speed_command.py").write_text(COMMAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def replace(**kinds: tuple[str, dict[str, Any]]) -> None:
        made = {
            name: speed.Row(name, lambda found: [1.0], (2.0,), (), ["speed_command", name, what], **more)
            for name, (what, more) in kinds.items()
        }
        monkeypatch.setattr(speed, "ROWS", made)

    return replace


def run(names: list[str], gpus: int, out: Path, seconds: float = 60) -> None:
    out.mkdir()
    speed.Runner(names, gpus, out, seconds).run()


def test_commands_share_gpus_and_caches(rows: Callable[..., None], tmp_path: Path) -> None:
    rows(
        pair=("runs", {"gpus": 2}), later=("runs", {"after": "first", "limit": 120}), first=("runs", {"limit": 40}),
        reads=("", {"of": "first"}), four=("runs", {"gpus": 4}),
    )  # fmt: skip
    run(["pair", "later", "reads", "four"], 2, tmp_path / "out")
    assert (tmp_path / "order").read_text().split() == ["first", "later", "pair"]
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert {name: one["kept"] for name, one in found.items()} == {"first": False, "later": True, "pair": False}
    assert found["pair"]["gpus"] == "0,1"
    assert cells(tmp_path / "out", "reads")[0] == "1"


def test_failing_and_hanging_commands_leave_other_results(
    rows: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows(hangs=("hangs", {"limit": 2}), fails=("fails", {}), runs=("runs", {}))
    run(["hangs", "fails", "runs"], 1, tmp_path / "out")
    assert [cells(tmp_path / "out", name)[0] for name in ("hangs", "fails", "runs")] == ["–", "–", "1"]
    printed = capfd.readouterr().out
    assert "hangs: killed after 2 s" in printed
    assert "fails: exit code 1" in printed
    assert "no such device" in printed
    child = int((tmp_path / "out" / "hangs.txt").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_without_time_nothing_begins(
    rows: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows(first=("runs", {}))
    run(["first"], 1, tmp_path / "out", 5)
    assert "first: not begun, 5 s are left" in capfd.readouterr().out
    assert not (tmp_path / "order").exists()
