"""Prompts, parameters and checks of the tests of ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

from typing import Any

from unisono import LLM, SamplingParams

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [300, 301], [40] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=1)
USER = [{"role": "user", "content": "x"}]


def ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def idle(llm: LLM) -> None:
    """Nothing is left of any request."""
    while llm.engine.has_work():
        llm.engine.step()
    llm.engine.reset_prefix_cache()
    llm.engine.check_integrity()
    assert not llm.loop.busy
    assert not llm.engine.scheduler.running
