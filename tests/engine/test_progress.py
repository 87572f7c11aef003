"""What passes change of running requests is kept as arrays by slot, in step with the requests themselves."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.helpers import engine, mixed_params, prompts
from unisono.engine.worker.progress import NOBODY, Progress
from unisono.types import EngineRequest, SpeculativeConfig


@pytest.mark.parametrize("spec", [None, SpeculativeConfig("ngram", num_speculative_tokens=3)], ids=["none", "ngram"])
def test_arrays_and_requests_agree_after_every_step(qwen3: Path, spec: SpeculativeConfig | None) -> None:
    """With more requests than slots, few pages, so that requests are preempted, and aborts while passes are on their
    way, after which others get the slots."""
    rng = random.Random(3)
    with engine(qwen3, max_num_seqs=4, num_pages=20, speculative=spec) as llm:
        core, open_requests = llm.engine, list[str]()
        for i, (prompt, params) in enumerate(zip(prompts(16, 100), mixed_params(16, 40), strict=True)):
            core.add(EngineRequest(str(i), prompt, params))
            open_requests.append(str(i))
        while core.has_work():
            for delta in core.step():
                if delta.finish:
                    open_requests.remove(delta.request_id)
            core.check_integrity()
            if open_requests and rng.random() < 0.03:
                core.abort(open_requests.pop(rng.randrange(len(open_requests))))
                core.check_integrity()
        assert core.scheduler.preemptions > 0
        assert (core.scheduler.progress.owner == NOBODY).all()
        core.scheduler.progress.owner[0] = 7
        with pytest.raises(RuntimeError, match="1 slots have an owner, 0 requests"):
            core.check_integrity()


def test_numbers_of_the_next_round() -> None:
    progress = Progress(4)
    progress.begin(2, owner=7, length=15, max_length=40, max_drafts=None, mapped=1)
    progress.begin(0, owner=8, length=15, max_length=17, max_drafts=2, mapped=1)
    slots = np.array([2, 0])
    assert progress.owned(slots, np.array([7, 9])).tolist() == [True, False]
    assert progress.worst(slots, width=4).tolist() == [19, 17]
    assert progress.outgrown(slots, np.array([17, 16])) == [0], "a page holds 16 tokens"
    assert progress.most_drafts(slots).tolist() == [15, 1]
    progress.launched(slots)
    progress.launched(slots)
    assert progress.going_on(slots).tolist() == [True, False], "two passes in flight bring two tokens at least"
    for counts, starts in (([3, 1], [14, 14]), ([2, 0], [17, 14])):  # the second is of nothing for one of them
        brought = np.array(counts)
        progress.read(slots, brought, brought > 0)
        assert progress.round_start[slots].tolist() == starts
    assert progress.length[slots].tolist() == [20, 16]
    assert progress.in_flight[slots].tolist() == [0, 0]
