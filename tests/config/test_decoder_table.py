"""The table of decoders guards what it computes: every field of the formula is read by a row, neutral, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.configs import of_class, write
from tests.models.make_plain import ARCHITECTURES as WITHOUT_CLASS
from tests.models.table_cases import CASES, fields_of
from unisono.config.decoder_table import ROWS
from unisono.config.preflight.families import ANY, facts_of
from unisono.config.preflight.formula import FORMULA, check_formula, check_model_type
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError

WHERE = Path("config.json")
OTHERS: tuple[Any, ...] = (7.25, True, False, "other", [0, 1], 3)
"""Values of which at least one changes something for every field."""


def config_of(architecture: str) -> dict[str, Any]:
    """The config of the architecture's first case."""
    name = next(name for name, (found, _) in CASES.items() if found == architecture)
    row = ROWS[architecture]
    text = {key: value for key, value in fields_of(name).items() if key != "model_type"}
    if row.activation != "silu":
        text["hidden_act"] = row.activation
    if row.seen:
        return {"model_type": row.model_types[0], "text_config": {**text, "model_type": row.text_types[0]}}
    return {**text, "model_type": row.model_types[0]}


@pytest.mark.parametrize("architecture", ROWS)
def test_unsupported_field_values_raise_for_every_row(architecture: str) -> None:
    config, takes = config_of(architecture), facts_of(ROWS[architecture]).takes
    check_model_type(architecture, config, WHERE)
    check_formula(architecture, config, WHERE)
    text = config.get("text_config", config)
    for name, neutral in FORMULA.items():
        if takes.get(name) is ANY:
            continue
        changed = [value for value in OTHERS if not neutral(value, text) and value not in takes.get(name, ())]
        assert changed, name
        for value in changed:
            edited = {**text, name: value}
            edited = {**config, "text_config": edited} if "text_config" in config else edited
            with pytest.raises(CheckpointError, match=name):
                check_formula(architecture, edited, WHERE)


@pytest.mark.parametrize("architecture", ROWS)
def test_rows_refuse_configs_of_other_rows(architecture: str) -> None:
    for other in ROWS:
        if other != architecture:
            with pytest.raises(CheckpointError, match="model_type"):
                check_model_type(architecture, config_of(other), WHERE)


@pytest.mark.parametrize("architecture", ROWS)
@pytest.mark.parametrize("kind", ["longrope", "su", "dynamic"])
def test_rope_types_of_few_families_are_refused_by_the_others(architecture: str, kind: str) -> None:
    row = ROWS[architecture]
    known = bool({"alpha", "dynamic"} & {*row.rope_types}) if kind == "dynamic" else "longrope" in row.rope_types
    edited = {**config_of(architecture), "rope_scaling": {"rope_type": kind, "factor": 2.0}}
    if known:
        check_formula(architecture, edited, WHERE)
        return
    with pytest.raises(CheckpointError, match="rope_type"):
        check_formula(architecture, edited, WHERE)


@pytest.mark.parametrize("architecture", [name for name in ROWS if name not in WITHOUT_CLASS.values()])
def test_the_default_config_of_the_class_is_read(architecture: str, tmp_path: Path) -> None:
    """transformers' own defaults, which are those of a published model in most classes."""
    row = ROWS[architecture]
    config = of_class(row.model_types[0], architectures=[architecture], eos_token_id=0)
    opened = Checkpoint.open(write(tmp_path / "c", config))
    text = config.get("text_config", config)
    assert opened.config.num_layers == text["num_hidden_layers"]
    assert opened.config.attention_shapes[0][0] == text["num_attention_heads"]
