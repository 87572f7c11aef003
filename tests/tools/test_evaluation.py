"""``unisono eval``: the bundled model solves most problems, and speculation changes how fast, never which."""

from __future__ import annotations

import base64
import io
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from benchmarks import command
from benchmarks.drafters import HEADS, drafters
from unisono.entrypoints.llm import LLM
from unisono.tools.eval.command import evaluate
from unisono.tools.eval.picture_problems import picture_problems
from unisono.tools.eval.scenes import draw
from unisono.types import SpeculativeConfig

BARS = {"eagle3": 2.5, "eagle": 2.0, "mtp": 2.0, "standalone": 2.0, "ngram": 1.2, "suffix": 1.2}
"""Tokens a round at k = 3. ngram learns from answers that have ended: on few problems it has less than on many."""

COUNT = 12


def run(spec: SpeculativeConfig) -> tuple[int, int, float | None]:
    with LLM("tiny", graph_capture="lazy", max_model_len=512, max_num_seqs=4, speculative=spec) as llm:
        found = evaluate(llm, COUNT, 200)
    assert len(found.lines()) == (2 if spec.method == "none" else 3)
    assert found.problems == COUNT == sum(count for _, count in found.by_kind.values())
    return found.right, found.tokens, found.accept_length


@pytest.fixture(scope="module")
def plain() -> tuple[int, int, float | None]:
    return run(SpeculativeConfig("none"))


def test_tiny_model_solves_most_problems(plain: tuple[int, int, float | None]) -> None:
    right, tokens, accept_length = plain
    assert right >= 0.75 * COUNT
    assert tokens > 20 * COUNT
    assert accept_length is None


USUAL = ("mtp",)


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in USUAL else pytest.mark.full) for m in HEADS])
def test_bundled_heads_reach_their_acceptance_and_change_no_answer(
    method: str, plain: tuple[int, int, float | None]
) -> None:
    right, tokens, accept_length = run(SpeculativeConfig(method, HEADS[method], 3))
    assert (right, tokens) == plain[:2]
    assert accept_length is not None
    assert accept_length >= BARS[method]


def test_vision_model_is_evaluated_on_images() -> None:
    """An engine that says that it has a tower gets each picture as a PNG in a data URL, before the question."""
    asked: list[Any] = []

    class Seeing:
        engine = SimpleNamespace(
            info=lambda: {"vision": {"merge": 2}},
            pin_drafts=lambda k: None,
            runner=SimpleNamespace(choices=[0]),
            counters=SimpleNamespace(accepted_per_position=(), accept_length=1.0, accepted_share_per_position=()),
        )

        def chat(self, messages: list[Any], params: Any) -> list[Any]:
            asked.extend(messages)
            answers = [f"so #### {one.final_answer}" for one in picture_problems(len(messages))]
            answers[0] = "#### nothing"
            outputs = [SimpleNamespace(text=text, token_ids=[1, 2]) for text in answers]
            return [SimpleNamespace(outputs=[output]) for output in outputs]

    found = evaluate(cast(LLM, Seeing()), 5, 50)
    assert (found.problems, found.right, found.tokens) == (5, 4, 10)
    for messages, problem in zip(asked, picture_problems(5), strict=True):
        picture, text = messages[0]["content"]
        assert text == {"type": "text", "text": problem.question}
        data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), draw(problem.scene))


@pytest.mark.full
def test_bench_drafters_reports_speedup(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(drafters, ["--problems", "3", "--batch", "1,2", "--methods", "eagle3"])
    assert not ended.value.code
    plain, eagle3 = (re.split(r" *\| *", line)[1:-1] for line in capsys.readouterr().out.splitlines()[2:])
    assert [plain[0], eagle3[0], eagle3[-1]] == ["`none`", "`eagle3`", "yes"]
    assert all(float(cell.split()[0]) > 0 for cell in (*plain[1:3], *eagle3[1:3]))
    assert float(eagle3[3]) > 2 > float(plain[3])
    assert eagle3[4] == plain[4]
