"""``unisono bench drafters``: a row for each drafter, and a failure if a text changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from unisono.cli.main import app
from unisono.config import catalog
from unisono.tools.bench import drafters
from unisono.tools.bench.drafters import SETUPS, Setup, setups_of
from unisono.tools.eval.command import Evaluation
from unisono.types import ConfigError, SpeculativeConfig

RUN = ["bench", "drafters", "tiny", "--problems", "2", "--max-tokens", "12", "--device", "cpu", "-k", "5"]


def test_setups() -> None:
    assert setups_of("ngram, eagle3:tiny-eagle3,dflash:./a:b/c/:15", 7) == [
        Setup("ngram", None, 7), Setup("eagle3", "tiny-eagle3", 7), Setup("dflash", "./a:b/c/", 15),
    ]  # fmt: skip
    assert [setup.name for setup in setups_of("ngram,dflash:/a/b/c/:15", 7)] == ["ngram", "dflash (c)"]
    with pytest.raises(ConfigError, match="method:directory:k"):
        setups_of("ngram,,eagle", 3)


def test_bundled_setups_name_bundled_checkpoints() -> None:
    assert set(SETUPS) == {name for name in catalog.bundled if (catalog.bundled[name] / "tokenizer.json").is_file()}
    for setups in SETUPS.values():
        for setup in setups_of(setups, 7):
            catalog.drafters.load(setup.method)


def test_rows_are_those_of_the_engine() -> None:
    done = CliRunner().invoke(app, [*RUN, "--setups", "ngram,eagle3:tiny-eagle3:3"])
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["drafter", "---", "none", "ngram", "eagle3 (tiny-eagle3)"]
    assert [row[1] for row in rows[2:]] == ["0", "5", "3"]
    assert [len(row[3].split()) for row in rows[3:]] == [5, 3]
    assert 2 < float(rows[4][2]) <= 4
    assert [row[6] for row in rows[3:]] == ["yes", "yes"]


def test_a_changed_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: str, spec: SpeculativeConfig, *_: Any) -> Evaluation:
        same = Evaluation(2, 1, {}, 10, 1.0, 2.5, (0.8, 0.7), answers=((1, 2), (3,)))
        return replace(same, answers=((1, 2), (4,))) if spec.method == "suffix" else same

    monkeypatch.setattr(drafters, "_measured", measured)
    assert CliRunner().invoke(app, [*RUN, "--setups", "ngram"]).exit_code == 0
    done = CliRunner().invoke(app, [*RUN, "--setups", "ngram,suffix"])
    assert done.exit_code != 0
    assert "a text changed with suffix" in done.output + str(done.exception)
