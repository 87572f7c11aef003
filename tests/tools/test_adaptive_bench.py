"""``benchmarks.adaptive`` and ``benchmarks.plot_adaptive``, on the bundled model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.adaptive import Curve, Point, adaptive, measure
from benchmarks.command import run as run_command
from benchmarks.plot_adaptive import plot

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


def run(command: Callable[..., None], *args: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(command, args)
    assert not ended.value.code


@pytest.mark.full
@pytest.mark.parametrize("rates", ["0.9,0.7", ""], ids=["synthetic", "problems"])
def test_every_way_is_measured_and_written(tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    flags = ["--concurrency", "2", "--rounds", "12", "--cycles", "1", "--context", "32", "--out", str(out)]
    run(adaptive, "--speculative-config", NGRAM, "--synthetic-acceptance-rates", rates, *flags)
    shown = capsys.readouterr().out
    (point,) = json.loads(out.read_text())["points"]
    speeds = point["tokens_per_second"]
    assert list(speeds) == ["none", "adaptive", "k=0", "k=1", "k=2"]
    assert min(speeds.values()) > 0
    assert point["against_none"] == pytest.approx(speeds["adaptive"] / speeds["none"])
    assert 0 <= point["mean_k"] <= 2
    assert ("SYNTHETIC" in shown) is bool(rates)
    assert out.with_suffix(".md").read_text().strip() in shown
    assert Curve.read(out).points[0].concurrency == 2
    assert point["spread"] == dict.fromkeys(speeds, 1.0), "of one turn"


def test_a_turn_that_the_machine_stopped_in_does_not_decide() -> None:
    class Pinned:
        """An engine whose second turn is ten times slower."""

        def __init__(self) -> None:
            self.engine = self.draft_controller = self.runner = self
            self.rounds, self.choices, self.turns = Counter[int](), (0, 1), 0

        def pin_drafts(self, k: int | None) -> None:
            self.k = k

    def stretch(llm: Pinned, size: int) -> tuple[int, float]:
        llm.turns += llm.k == 1
        return 100, 10.0 if llm.k == 1 and llm.turns == 2 else 1.0

    point = measure(Pinned(), Pinned(), 4, stretch, cycles=3)
    assert point.tokens_per_second == {"none": 100.0, "adaptive": 100.0, "k=0": 100.0, "k=1": 100.0}
    assert point.spread == {"none": 1.0, "adaptive": 1.0, "k=0": 1.0, "k=1": 10.0}


def test_the_best_fixed_number_is_compared_with() -> None:
    point = Point(4, {"none": 10.0, "adaptive": 11.4, "k=0": 9.0, "k=1": 12.0, "k=2": 8.0}, 1.0)
    assert point.best_fixed == "k=1"
    assert point.against_best == pytest.approx(0.95)
    assert point.against_none == pytest.approx(1.14)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [Point(n, {"none": 10.0 * n, "adaptive": 12.0 * n, "k=0": 9.5 * n, "k=1": 11.0 * n}, 1.0) for n in (1, 4)]
    Curve("tiny", NGRAM, [0.5], {"on": "a machine"}, 32, 1.0, points).write(tmp_path / "r.json")
    run(plot, str(tmp_path / "r.json"), str(tmp_path / "r.png"))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
