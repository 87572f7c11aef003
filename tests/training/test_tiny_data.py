"""The bundled model's data: right arithmetic, a test split kept apart, the same text each time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from training.tiny import data, documents, problems, retell, skeletons
from training.tiny.chains import COMPOSITIONS
from training.tiny.stories import NUMBER_WORDS, Problem
from unisono.tools.eval.problems import COUNT, FILE

ROOT = Path(__file__).parent.parent.parent

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def train_problems(n: int, seed: int = 0) -> list[Problem]:
    rng = Random(seed)
    return [data.train_problem(rng) for _ in range(n)]


def check_arithmetic(problem: Problem) -> None:
    *steps, last = problem.worked_answer.splitlines()
    assert steps, problem
    for step in steps:
        equations = EQUATION.findall(step)
        assert len(equations) == 1, step
        left, operator, right, result = equations[0]
        exact = {
            "+": int(left) + int(right),
            "-": int(left) - int(right),
            "*": int(left) * int(right),
            "/": int(left) / int(right),
        }[operator]
        assert exact == int(result) > 0, step
    assert last == f"#### {result}"
    assert problem.final_answer == result


@pytest.mark.parametrize("kind", list(data.KINDS))
def test_arithmetic_of_test_problems(kind: str) -> None:
    rng = Random(1)
    for _ in range(300):
        check_arithmetic(data.test_problem(kind, rng))


def test_arithmetic_of_training_problems() -> None:
    for problem in train_problems(3000):
        check_arithmetic(problem)


def test_templates_leave_no_placeholders() -> None:
    for problem in train_problems(3000, seed=2) + [problem for _, problem in data.test_split(300)]:
        text = problem.question + problem.worked_answer.replace("#### ", "")
        assert not re.search(r"[{}|\[\]()@!#]", text), problem


def test_steps_use_only_known_numbers() -> None:
    """Steps use numbers of the question, earlier results, or constants that its words stand for (a week, half, 25%)."""
    constants = {"2", "3", "4", "5", "7", "10", "12", "60"}
    for problem in train_problems(2000, seed=3):
        words = {str(n) for n, word in enumerate(NUMBER_WORDS) if word in problem.question.lower()}
        known = constants | words | set(re.findall(r"\d+", problem.question))
        for left, _, right, result in EQUATION.findall(problem.worked_answer):
            assert {left, right} <= known, problem
            known.add(result)


def test_split_is_deterministic_and_prefix_stable() -> None:
    first = data.test_split(120)
    assert first == data.test_split(120)
    assert data.test_split(40) == first[:40]
    assert data.test_problems(10) == [(p.question, p.worked_answer, p.final_answer) for _, p in first[:10]]
    assert train_problems(50, seed=4) == train_problems(50, seed=4) != train_problems(50, seed=5)


def test_split_is_the_same_in_a_fresh_process_and_needs_no_torch() -> None:
    code = (
        "import sys; from training.tiny.data import test_problems; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(test_problems(30))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(data.test_problems(30))


def test_split_holds_every_kind_once_per_question() -> None:
    split = data.test_split(500)
    assert Counter(kind for kind, _ in split) == {kind: share * 20 for kind, share in data.KINDS.items()}
    assert len({problem.question for _, problem in split}) == 500


def test_train_and_test_share_no_instance() -> None:
    train = train_problems(20_000, seed=6)
    seen_questions = {problem.question for problem in train}
    seen_instances = {(data.template_of(problem), problem.numbers) for problem in train}
    for _, problem in data.test_split(500):
        assert problem.question not in seen_questions
        assert (data.template_of(problem), problem.numbers) not in seen_instances


def test_held_out_templates_never_occur_in_training() -> None:
    train = train_problems(20_000, seed=7)
    templates, names = {problem.template for problem in train}, {data.template_of(problem) for problem in train}
    for kind, problem in data.test_split(500):
        if kind == "numbers":
            assert not (":" in problem.template and data.composition_held_out(data.template_of(problem)))
        elif kind == "wording":
            assert problem.template not in templates
            assert data.template_of(problem) in names
        else:
            assert data.template_of(problem) not in names


def test_training_only_skeletons_are_absent_from_the_test_split() -> None:
    added = {skeleton.name for skeleton in skeletons.TRAINED_ONLY}
    assert added <= {data.template_of(problem) for problem in train_problems(10_000, seed=10)}
    assert not added & {data.template_of(problem) for _, problem in data.test_split(500)}


def test_there_are_many_templates() -> None:
    assert len(skeletons.SKELETONS) >= 60
    assert sum(map(len, COMPOSITIONS.values())) >= 500
    every = skeletons.SKELETONS + skeletons.TRAINED_ONLY + skeletons.HELD_OUT
    for skeleton in every:
        assert skeleton.steps, skeleton.name
        assert len(set(skeleton.wordings)) == len(skeleton.wordings), skeleton.name
    names = [skeleton.name for skeleton in every]
    assert len(set(names)) == len(names)


def test_retelling_keeps_the_numbers() -> None:
    rng = Random(8)
    for problem in train_problems(2000, seed=8):
        told = retell.retell(problem.question, rng)
        assert sorted(re.findall(r"\d+", told)) == sorted(re.findall(r"\d+", problem.question)), told


def test_documents_are_well_formed() -> None:
    rng, library = Random(9), documents.standard_library()
    for _ in range(500):
        pieces = documents.document(rng, library)
        text = "".join(piece for piece, _ in pieces)
        assert text.endswith(documents.END)
        assert text.count(documents.START) == text.count(documents.STOP)
        assert all(0 <= weight <= 1 for _, weight in pieces)


def test_the_package_ships_the_test_split() -> None:
    """``unisono/tools/eval/problems.jsonl`` is what ``python -m training.tiny.problems`` writes."""
    assert FILE.read_text(encoding="utf-8").splitlines() == problems.lines(COUNT)
    shipped = [json.loads(line) for line in problems.lines(20)]
    assert [(p["kind"], p["question"], p["final_answer"]) for p in shipped] == [
        (kind, problem.question, problem.final_answer) for kind, problem in data.test_split(20)
    ]
