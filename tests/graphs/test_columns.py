"""Drafter × kind of graph × way to run an engine: ranks, whole experts, pages in host memory or of another engine,
adapters, pictures, mixed passes. Each cell has the bytes of a plain run without graphs, and each of its passes is a
replay of its kind.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.matrix import DRAFTERS, Checkpoints
from tests.graphs.columns import COLUMNS, FLAGS, Came, checkpoints, spec_of
from tests.graphs.kinds import KINDS
from tests.models.make import make_checkpoint

METHODS = ("none", *DRAFTERS)
FAST = {
    ("tensor parallel", "none", "full"),
    ("expert parallel", "ngram", "full"),
    ("offload", "eagle3", "full"),
    ("roles", "mtp", "full"),
    ("adapters", "ngram", "full"),
    ("pictures", "suffix", "segmented"),
    ("Gemma 4", "mtp_frozen", "segmented"),
    ("Gemma 4", "eagle3", "full"),
    ("pictures, both ways", "ngram", "segmented"),
    ("pictures, both ways", "eagle3", "full"),
    ("mixed passes", "eagle3", "segmented"),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in FAST else pytest.mark.full)
    for name, column in COLUMNS.items()
    for cell in itertools.product((name,), column.methods or METHODS, KINDS)
]


@pytest.fixture(scope="module")
def usual(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoints]:
    """As the matrix's, but that all heads can be divided among ranks."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    targets = {**checkpoints, "qwen3": make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **sizes)}
    makers = {**DRAFTERS, "none": lambda targets, folder: (targets["qwen3"], None)}
    return functools.cache(lambda method: makers[method](targets, tmp_path_factory.mktemp(method)))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TRANSFER_KEY", "secret")


@pytest.fixture(scope="module")
def cell(usual: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Checkpoints, Any]]:
    """(column, drafter) -> its checkpoints, and a function from a backend to what came of the plain run."""

    @functools.cache
    def made(name: str, method: str) -> tuple[Checkpoints, Any]:
        column, folder = COLUMNS[name], tmp_path_factory.mktemp("column")
        found = checkpoints(column, method, usual, folder)
        plain = functools.cache(
            lambda backend: column.run(
                False, found[0], spec_of(method, found[1]), {**FLAGS, "graphs": "off", "attention_backend": backend}
            )
        )
        return found, plain

    return made


@pytest.mark.parametrize(("name", "method", "kind"), CELLS)
def test_a_cell(name: str, method: str, kind: str, cell: Any) -> None:
    column, graphs = COLUMNS[name], KINDS[kind]
    (target, model), plain = cell(name, method)
    expected: Came = plain(graphs.backend)
    flags = {**FLAGS, "attention_backend": graphs.backend, **graphs.flags}
    found = column.run(True, target, spec_of(method, model), flags)
    assert found.outputs == expected.outputs
    assert found.proof > 0, "the column was not used"
    if column.same:
        assert found.accepted == expected.accepted
    for (program, how, reason), count in found.passes.items():
        if program in ("extend", "mixed", "round") and reason != "NOT_CAPTURED":
            assert how == graphs.of(program, method), (program, how, reason, count)
    assert sum(n for (program, how, _), n in found.passes.items() if program == "round") > 0


def test_every_column_has_a_quick_cell() -> None:
    assert {name for name, *_ in FAST} == set(COLUMNS)
