"""Bundled models speculate by default, with a head of their own or MTP modules, and say so; the text stays the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.http.conftest import serving
from unisono import LLM, SamplingParams
from unisono.cli.main import app
from unisono.config import catalog
from unisono.types import SpeculativeConfig

SMALL = {"device": "cpu", "max_num_seqs": 1, "max_model_len": 256}
FLAGS = ["--device", "cpu", "--max-num-seqs", "1", "--max-model-len", "256"]
QUESTION = [{"role": "user", "content": "Lena has 5 boxes with 12 pens each. She gives away 9. How many are left?"}]
MODELS = [name for name, path in catalog.bundled.items() if (path / "tokenizer.json").is_file()]
METHODS = {
    "tiny": ("eagle3", "the bundled head tiny-eagle3"),
    "tiny-hybrid": ("mtp", "carries 1 MTP module"),
    "tiny-gemma": ("mtp_frozen", "the assistant beside the checkpoint"),
    "tiny-vl": ("eagle3", "the bundled head tiny-vl-eagle3"),
}


def test_every_bundled_model_is_looked_at() -> None:
    """A bundled model that somebody adds has a head, MTP modules, or an entry here that says it has neither."""
    assert set(MODELS) == set(METHODS)


@pytest.mark.parametrize("model", MODELS)
def test_bundled_models_speculate_by_default(model: str) -> None:
    method, why = METHODS[model]
    asked = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model, graph_capture="lazy", **SMALL) as llm:
        info = llm.engine.info()
        (row,) = (row for row in info["decisions"] if row["name"] == "speculative")
        assert info["speculation"]["drafter"] == method
        assert info["settings"]["speculative"]["method"] == method
        assert why in row["reason"]
        assert "--speculative-method none turns it off" in row["reason"]
        llm.engine.pin_drafts(3)  # on a busy machine the measured times may speak against drafting
        drafted = llm.chat(QUESTION, asked)[0].outputs[0].token_ids
        assert llm.engine.counters.accepted_tokens > 0
    with LLM(model, speculative=SpeculativeConfig("none"), enforce_eager=True, **SMALL) as llm:
        assert llm.chat(QUESTION, asked)[0].outputs[0].token_ids == drafted


def test_server_logs_default_speculation(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS, "--enforce-eager") as server:  # as `make serve` does: no PATH
        log = server.log.read_text()
        assert (
            "Speculation: eagle3, k = 3 (the bundled head tiny-eagle3; --speculative-method none turns it off)" in log
        )
        assert server.info()["speculation"]["drafter"] == "eagle3"


def test_flags_and_other_places_win(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["explain", "tiny", "--speculative-method", "none", "--json", *FLAGS])
    assert json.loads(told.stdout)["speculation"]["drafter"] == "none"
    copied = tmp_path / "tiny"
    copied.mkdir()
    for file in catalog.bundled_path("tiny").iterdir():
        (copied / file.name).symlink_to(file)
    assert catalog.drafts_of(copied) is None
    assert catalog.drafts_of(catalog.bundled_path("tiny")) == SpeculativeConfig("eagle3", model="tiny-eagle3")
