"""MiniCPM and InternLM2: rope types, defaults of the published classes, formats of packed projections, refusals."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.harness import load, whole
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.table_cases import fields_of
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError

PROMPT = random.Random(0).choices(range(256), k=90)
DYNAMIC = {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 3.0}}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.7],
    "long_factor": [1.2, 2.0, 5.0, 9.0, 9.0, 9.0],
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "internlm2-dynamic": ("internlm2", {**fields_of("internlm2"), **DYNAMIC}, 90),
    "minicpm-dynamic": ("minicpm", DYNAMIC, 90),
    "minicpm4-longrope": ("minicpm", {"rope_scaling": LONG}, 512),
    "minicpm4-longrope-short": ("minicpm", {"rope_scaling": LONG, "max_position_embeddings": 64}, 64),
    "ling-yarn": ("bailing_moe", {"rope_scaling": YARN, "rope_theta": 600000.0}, 512),
}
"""Name -> (model type, fields, longest text)."""


@pytest.mark.parametrize("case", CASES)
def test_rope_types_are_the_published_ones(case: str, tmp_path: Path) -> None:
    family, fields, longest = CASES[case]
    path = make_checkpoint(tmp_path, family, tokenizer=False, **fields)
    prompt = PROMPT[:longest]
    (ours,) = whole(load(path, max_positions=longest), [prompt])
    theirs = reference(path, longest)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "rope_scaling": None}))
    (still,) = whole(load(path, max_positions=64), [prompt[:64]])
    assert not torch.allclose(ours[:64], still, atol=1e-2), "the rope type changes nothing"


def test_minicpm_is_tied_by_default_and_may_lack_a_model_type(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "minicpm", tokenizer=False, tie_word_embeddings=None, model_type=None)
    raw = json.loads((path / "config.json").read_text())
    assert not {"model_type", "tie_word_embeddings"} & raw.keys()
    assert Checkpoint.open(path).config.tie_embeddings


def test_internlm2_has_biases_by_default(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "internlm2", tokenizer=False, **fields_of("internlm2"))
    raw = json.loads((path / "config.json").read_text())
    del raw["bias"]
    (path / "config.json").write_text(json.dumps(raw))
    assert Checkpoint.open(path).config.attention.qkv_bias


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse_config={'kernel_size': 32}": ("minicpm", {"sparse_config": {"kernel_size": 32}}),
    "num_experts=8": ("minicpm", {"num_experts": 8, "num_experts_per_tok": 2}),
    "dim_model_base=0": ("minicpm", {"dim_model_base": 0}),
    "scale_emb=None": ("minicpm", {"scale_emb": None}),
    "hidden_act='gelu'": ("minicpm", {"hidden_act": "gelu"}),
    "model_type='minicpm3'": ("minicpm", {"model_type": "minicpm3"}),
    "partial_rotary_factor=0.5": ("internlm2", {"partial_rotary_factor": 0.5}),
    "longrope": ("internlm2", {"rope_scaling": LONG}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_fields_are_refused_by_name(says: str, tmp_path: Path) -> None:
    family, fields = REFUSED[says]
    path = make_checkpoint(tmp_path, family, tokenizer=False, **(fields_of(family) if family == "internlm2" else {}))
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(CheckpointError, match=re.escape(says)):
        Checkpoint.open(path)
