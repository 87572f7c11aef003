"""An assistant drafts text about pictures whose tokens see each other: the text is the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_assistant import make_assistant
from tests.drafters.make_heads import make_eagle3
from tests.engine.gemma_pictures import make_gemma4, shapes
from tests.engine.helpers import engine, mixed_params
from tests.engine.pictures import run, vision_of
from tests.models.fields import GEMMA4_EXPERTS
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SpeculativeConfig


@pytest.mark.parametrize("method", ["mtp_frozen", pytest.param("eagle3", marks=pytest.mark.full)])
def test_drafts_leave_the_text_about_pictures(method: str, tmp_path: Path) -> None:
    """In one pass, in chunks, behind cached prefixes, with pages for few requests."""
    path = make_gemma4(tmp_path / "target", **GEMMA4_EXPERTS)
    prompts = shapes(vision_of(path))
    params = mixed_params(len(prompts), 12)
    if method == "eagle3":
        draft = make_eagle3(tmp_path / "head", Checkpoint.open(path).config, (1, 1, 2), aux=[1, 1, 2]).path
    else:
        draft = make_assistant(tmp_path / "draft", path)
    with engine(path, dtype="float32") as llm:
        own = run(llm, prompts, params)
    several: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 96, "max_num_seqs": 2}]
    for flags in several:
        spec = SpeculativeConfig(method, str(draft), num_speculative_tokens=3)
        with engine(path, dtype="float32", speculative=spec, **flags) as llm:
            assert [run(llm, prompts, params) for _ in range(2)] == [own, own]
            assert llm.engine.counters.drafted_tokens > 0
            assert llm.engine.scheduler.prefix_hits > 0
