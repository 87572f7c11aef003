"""Progress bars of a start and of prompts: on a terminal, in a notebook, of another class, and none."""

from __future__ import annotations

import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.shared import PROMPTS
from unisono import LLM, SamplingParams
from unisono.entrypoints.progress_bar import STAGES

ROOT = Path(__file__).parent.parent.parent


def test_a_bar_in_a_notebook_needs_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.entrypoints import progress_bar as bars

    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with bars.prompts_bar(True, 3) as advance:
        advance(1, 10)
    assert "1/3" in sys.stderr.getvalue()  # type: ignore[attr-defined]


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    params, small = SamplingParams(max_tokens=3, ignore_eos=True), {"enforce_eager": True, "max_model_len": 64}
    with LLM("tiny", **small) as quiet:
        quiet.generate(PROMPTS[:2], params)
    assert capsys.readouterr().err == "", "no terminal, no bar"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LLM("tiny", **small):
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Loading the model" in shown
    assert shown.endswith("\r"), "the bar of a start is gone when it ends"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LLM("tiny", use_tqdm_on_load=False, **small):
        assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    llm.generate(PROMPTS[:2], params)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Prompts: 100%" in shown
    assert "2/2" in shown
    assert "tokens/s" in shown


def test_a_bar_counts_prompts(llm: LLM) -> None:
    counted: list[Any] = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            counted.append(total)

        def update(self, count: int) -> None:
            counted.append(count)

        def close(self) -> None:
            counted.append("closed")

    llm.generate(PROMPTS, SamplingParams(max_tokens=3, n=2, stop="e"), use_tqdm=Bar)
    assert counted == [4, 1, 1, 1, 1, "closed"]


def test_every_stage_of_a_start_has_a_description() -> None:
    """Stages of the engine's start, by the calls that report them."""
    reported = set[str]()
    for folder in ("engine", "entrypoints", "cli", "models"):
        for path in (ROOT / "unisono" / folder).rglob("*.py"):
            reported |= set(re.findall(r'\b(?:stage|progress)\("([a-z ]+)"', path.read_text()))
    assert {"load", "load tower", "compile", "capture"} <= reported <= STAGES.keys()
