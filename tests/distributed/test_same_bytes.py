"""Several ranks give the bytes of one process: every kind of request, prefix hits, preemption, graphs, drafters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import CELLS, COUNT, UNTRAINED
from tests.distributed.requests_ import MANY, ROOMY, differing, run, spec
from tests.engine.conftest import checkpoints, checkpoints_of  # noqa: F401
from tests.engine.helpers import draw_drafts
from tests.models.make import make_checkpoint

WITH_DRAFTS = spec("eagle3", model="tiny-eagle3", num_speculative_tokens=3)


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the next engine draw its numbers of drafts, the same for every engine."""
    return lambda: draw_drafts(monkeypatch)


def compare(drawn: Callable[[], None], path: Any, ranks: int, count: int, more: Any = None, **flags: Any) -> Any:
    drawn()
    alone = run(path, 1, count, **flags)
    drawn()
    together = run(path, ranks, count, **flags, **(more or {}))
    assert differing(alone, together) == 0
    for counted in ("hits", "preemptions", "accepted"):
        assert together[counted] == alone[counted], counted
    assert together["replays"] > 0
    assert together["hits" if flags.get("num_pages", 0) is None else "preemptions"] > 0
    return together


def test_two_ranks_with_an_eagle3_head(drawn: Callable[[], None], checkpoints_of: Any) -> None:  # noqa: F811
    target, draft = checkpoints_of("eagle3")
    given = spec("eagle3", model=str(draft), num_speculative_tokens=2)
    found = compare(drawn, target, 2, 9, speculative=given, adaptive=True)
    assert found["accepted"] > 0


def test_two_ranks_of_a_hybrid_with_whole_experts(drawn: Callable[[], None], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_5_moe_text", vocab_size=264)
    compare(drawn, path, 2, 8, more={"enable_expert_parallel": True}, **ROOMY)


@pytest.mark.full
def test_four_ranks_over_two_key_heads(drawn: Callable[[], None], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_5_moe_text", vocab_size=264)
    compare(drawn, path, 4, 3, **ROOMY)


@pytest.mark.full
@pytest.mark.parametrize("setup", CELLS)
def test_200_requests_of_every_cell(setup: str, drawn: Callable[[], None], tmp_path: Path) -> None:
    """Two and four ranks, and of a hybrid with whole experts too, against the same run of one process."""
    target, given = CELLS[setup](tmp_path)
    adaptive = given.method != "none" and not given.paths
    flags = {**MANY, "speculative": given, "adaptive": adaptive}
    drawn()
    alone = run(target, 1, COUNT, **flags)
    assert given.method == "none" or alone["accepted"] > 0 or setup in UNTRAINED
    for more in ({}, {"enable_expert_parallel": True}) if target == "tiny-hybrid" else ({},):
        for ranks in (2, 4):
            drawn()
            together = run(target, ranks, COUNT, **flags, **more)
            differ = differing(alone, together)
            print(f"{setup}, {ranks} ranks {more or ''}: {differ} of {2 * COUNT} differ", flush=True)
            assert differ == 0
            for counted in ("hits", "preemptions", "accepted"):
                assert together[counted] == alone[counted], counted


def test_ordered_sums_change_no_byte_for_one_number_of_ranks(drawn: Callable[[], None]) -> None:
    """Two ranks that add up terms: the same bytes with drafts, whichever passes there are; other sums than one has."""
    flags = {"tp_reduce": "ordered"}
    alone = run("tiny", 2, 4, captures=1, **flags)
    drawn()
    together = run("tiny", 2, 4, captures=1, speculative=WITH_DRAFTS, adaptive=True, **ROOMY, **flags)
    assert together["accepted"] > 0
    assert differing(alone, together) == 0
    other = run("tiny", 1, 4, captures=0)
    assert 0 < differing(other, alone) < 8  # hidden states differ in their last bits, few tokens do


@pytest.mark.full
def test_mixed_passes() -> None:
    """The other ranks replay them as rank 0 does."""
    flags = ROOMY | {"enable_mixed_chunk": True, "max_num_batched_tokens": 48}
    alone, together = run("tiny", 1, 12), run("tiny", 2, 12, **flags)
    assert differing(alone, together) == 0


@pytest.mark.full
@pytest.mark.parametrize("graphs", ["segmented", "off"])
def test_graphs_of_every_kind(graphs: str, drawn: Callable[[], None]) -> None:
    drawn()
    alone = run("tiny", 1, 12, speculative=WITH_DRAFTS)
    drawn()
    together = run("tiny", 2, 12, speculative=WITH_DRAFTS, graphs=graphs)
    assert differing(alone, together) == 0
