"""docs/extend/model.md and docs/extend/weight-format.md work as written, each with one command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import unisono
from tests.howto import blocks, install, run, text_of
from unisono.config import catalog

PACKAGE = Path(unisono.__file__).parent
FAMILIES = PACKAGE / "models" / "families"

PAGES = {
    "extend/model": ("tides", 2, ("(out * gate.sigmoid())", "(out * gate)")),
    "extend/weight-format": ("row_int8", 2, ("* layer.weight_scale)", "* 1)")),
}
"""By page: its module, how many tests pass, and (in the module or in its test) what to break."""


@pytest.mark.parametrize("page", PAGES)
def test_howto_command_passes(page: str, tmp_path: Path) -> None:
    assert text_of(page).rstrip().endswith(blocks(page, "sh")[0] + "```")
    install(page, PAGES[page][0], tmp_path)
    printed = run(page, tmp_path)
    assert f"{PAGES[page][1]} passed" in printed, printed


@pytest.mark.parametrize("page", ["extend/model", pytest.param("extend/weight-format", marks=pytest.mark.full)])
def test_howto_command_fails_for_a_broken_example(page: str, tmp_path: Path) -> None:
    install(page, PAGES[page][0], tmp_path)
    right, wrong = PAGES[page][2]
    broken = [f for f in tmp_path.glob("*.py") if right in f.read_text()]
    assert len(broken) == 1
    broken[0].write_text(broken[0].read_text().replace(right, wrong))
    assert "1 failed" in run(page, tmp_path, "-x")


def test_the_family_is_a_small_file() -> None:
    assert len(blocks("extend/model", "python")[0].splitlines()) <= 150


def test_the_page_lists_every_family() -> None:
    """Every architecture and every family's file, which is as small as docs/reference/models.md says."""
    page = text_of("reference/models")
    for architecture, where in catalog.models.entries.items():
        file = where.partition(":")[0].rpartition(".")[2] + ".py"
        assert f"`{architecture}`" in page
        assert f"`{file}`" in page or f"/{file}`" in page
        if file != "table.py":  # the reader of many families
            assert len((FAMILIES / file).read_text().splitlines()) <= 150


def test_a_family_is_one_file() -> None:
    """Only the two tables of families, and families that are built on Mixtral, name it."""
    naming = {file.name for file in PACKAGE.rglob("*.py") if "mixtral" in file.read_text().lower()}
    (lines,) = re.findall(r"`unisono/models/families/mixtral\.py` has (\d+) lines", text_of("extend/model"))
    assert len((FAMILIES / "mixtral.py").read_text().splitlines()) == int(lines)
    built_on_it = {"qwen3_moe.py", "qwen3_5_moe.py", "glm4_moe.py", "minimax_m2.py", "lfm2.py", "kimi_linear.py"}
    assert naming == {"mixtral.py", "catalog.py", "families.py", *built_on_it}
