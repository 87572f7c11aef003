"""The table of weight formats speaks of every format of the catalog, and names kernels, cards and tests that exist."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.models.quantised import LAYOUTS
from unisono.config import catalog
from unisono.layers.formats.base import PLAIN
from unisono.layers.formats.documented import GATED, ROWS

ROOT = Path(__file__).parents[2]


def test_every_format_and_every_layout_has_a_row() -> None:
    assert {row.method for row in ROWS if "`" not in row.method} == {*catalog.formats.entries}
    listed = [name for row in ROWS for name in row.tests if not name.startswith("tests/")]
    assert sorted(listed) == sorted(LAYOUTS)
    for name in {name for row in ROWS for name in row.tests} - {*listed}:
        assert (ROOT / name).is_file()


def test_kernels_exist_and_cards_are_those_of_the_gate() -> None:
    for row in ROWS:
        assert all(find_spec(f"unisono.kernels.{name}") is not None for name in row.kernels)
        assert {name for name in row.kernels if not name.endswith("_gluon")} <= {*GATED}
        assert ("8.0" in row.cards) is ("gemm.fp8" not in row.kernels)


def test_the_table_knows_which_formats_store_experts() -> None:
    for row in ROWS:
        for name in row.tests:
            if name in LAYOUTS:
                config = LAYOUTS[name].config
                made = catalog.formats.load(config["quant_method"])(config)("model.layers.0.mlp.experts.0.up_proj")
                fixed = name.endswith("static") and "int8" in name
                assert made is not PLAIN
                assert (getattr(made, "experts", None) is not None) == (row.experts and not fixed), name
