"""Every row of the table of decoders with a scaled rotary table, beyond the original length, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.harness import load, whole
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.make_plain import ARCHITECTURES
from tests.models.table_cases import CASES, YARN, family_of, fields_of
from unisono.config.decoder_table import ROWS

LENGTH = 90
"""Tokens; the original length of YARN is 64."""
OF_THEIR_OWN = [name for name, row in ROWS.items() if {"alpha", "longrope"} & {*row.rope_types}]
"""Rows with a rope type of their own, which ``test_table.py`` compares beyond the original length."""


def of_row(architecture: str) -> str:
    """The first case of a row."""
    return next(case for case, (name, _) in CASES.items() if name == architecture)


def scaled(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with YaRN in place of the default rotary table, of each layer type if they differ."""
    found = dict(fields.get("rope_parameters") or {})
    kinds = {name: {**each, **YARN} for name, each in found.items() if isinstance(each, dict)}
    return {**fields, "num_hidden_layers": 4, "rope_parameters": kinds or {**found, **YARN}}


def test_rows_with_a_rope_type_of_their_own_have_a_case_with_it() -> None:
    for name in OF_THEIR_OWN:
        ropes = [fields.get("rope_parameters") or {} for row, fields in CASES.values() if row == name]
        assert any("alpha" in rope or rope.get("rope_type") == "longrope" for rope in ropes)


@pytest.mark.parametrize(
    "architecture", [name for name in ROWS if name not in {*OF_THEIR_OWN, *ARCHITECTURES.values()}]
)
@torch.no_grad()
def test_a_row_goes_beyond_the_original_length(architecture: str, tmp_path: Path) -> None:
    """Logits within 2e-4 of transformers. ``test_minicpm.py`` compares the rows that it lacks."""
    case, rng = of_row(architecture), random.Random(0)
    prompt = [rng.randrange(256) for _ in range(LENGTH)]
    fields = scaled(fields_of(case))
    directory = make_checkpoint(tmp_path, family_of(case), tokenizer=False, **fields)
    (ours,) = whole(load(directory), [prompt])
    torch.testing.assert_close(ours, reference(directory)(torch.tensor([prompt])).logits[0], atol=2e-4, rtol=0)
