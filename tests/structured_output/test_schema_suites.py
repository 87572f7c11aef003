"""Public schemas, where they are at hand: no invalid value is accepted, nearly all schemas are right, quickly."""

from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.structured_outputs import ROOT, maskbench, results, suite, times
from benchmarks.text_check import TextCheck
from tests.structured_output.written import check_written
from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.types import BadRequest

DIRECTORY = ROOT.parent / "shared/schemas"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not DIRECTORY.is_dir(), reason="../shared/schemas is not there"),
]


def test_the_standards_suite() -> None:
    """What is refused is named; the valid values that are rejected are those of formats, which it takes for notes."""
    counts, wrong = results(suite(DIRECTORY))
    assert not wrong
    assert counts["taken"] >= 300
    assert counts["all right"] >= 290


def test_maskbench() -> None:
    counts, wrong = results(maskbench(DIRECTORY))
    assert not wrong
    assert counts["all right"] >= 0.92 * counts["schemas"]


@pytest.mark.parametrize("cases", [suite, maskbench], ids=["suite", "maskbench"])
def test_texts_that_masks_allow_are_valid(cases: object) -> None:
    chance, found = random.Random(1), 0
    for _, schema, _ in cases(DIRECTORY):  # type: ignore[operator]
        try:
            found += check_written(schema, TextCheck("json", schema), chance, 5)
        except (BadRequest, SchemaRefusedError):
            continue
    assert found > 500


def test_compile_and_mask_times_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    compiling, masks = times(maskbench(DIRECTORY))
    with capsys.disabled():
        print(f"\ncompiling {statistics.median(compiling):.1f} ms, a mask {statistics.median(masks):.0f} µs (medians)")
    assert len(compiling) > 200
    assert len(masks) > 10_000
