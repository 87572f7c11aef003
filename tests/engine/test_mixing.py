"""When running requests decode in prompt passes, by what passes were measured to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.config import EngineConfig, Hardware, resolve
from unisono.engine.scheduling.mixing import Mixing
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.engine.sequence import RoundWidths
from unisono.engine.startup.capture_candidates import decode_sizes
from unisono.graphs import Features, GraphKey, PassShape
from unisono.types import SpeculativeConfig

COSTS = {"extend": 48.0, "mixed": 50.0}
RUNNING: Any = [SimpleNamespace(states={})] * 20


class Requests(list):
    """Running requests that are their own rows."""

    @property
    def rows(self) -> Any:
        return self


def mixing(device: str, round_ms: float, drafts: bool = False) -> Mixing:
    """Of an engine whose passes take COSTS, and its rounds this long."""
    runner = SimpleNamespace(
        config=SimpleNamespace(max_num_batched_tokens=256, device=SimpleNamespace(type=device)),
        decode_sizes=(8, 32),
        features=Features(),
        mixed_key=lambda tokens, room: GraphKey("mixed", PassShape(tokens + room, 1 + room)),
        planner=SimpleNamespace(launched_ms=lambda key: COSTS[key.program]),
        tokens_filling_graph=lambda tokens, room: tokens,
    )
    controller = SimpleNamespace(drafts_nothing=lambda running: not drafts, round_ms=lambda running: round_ms)
    return Mixing(runner, controller)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "round_ms", "tokens"),
    [("cuda", 5.0, 168), ("cuda", 2.0, 168), ("cuda", 1.0, 0), ("cpu", 1.0, 168)],
)
def test_passes_are_mixed_if_faster_than_two(device: str, round_ms: float, tokens: int) -> None:
    """Their decoding rows take part of the tokens. A CPU always mixes: nothing is measured there."""
    assert mixing(device, round_ms).prompt_tokens(RUNNING, [], lambda ms: 200) == tokens


def test_conditions_that_disable_mixed_passes() -> None:
    asked = mixing("cuda", 5.0)
    mixed = asked.prompt_tokens(RUNNING, [], lambda ms: 256)
    assert mixed == 256 - 32, "the room for decoding rows is part of the pass"
    assert asked.prompt_tokens([], [], lambda ms: 200) == 0
    assert asked.prompt_tokens(RUNNING * 2, [], lambda ms: 200) == 0, "more than the largest room"
    apart: Any = SimpleNamespace(states=[SimpleNamespace(mixes=False)])
    assert asked.prompt_tokens(RUNNING, [apart], lambda ms: 200) == 0, "a feature that needs a pass of its own"
    assert mixing("cuda", 5.0, drafts=True).prompt_tokens(RUNNING, [], lambda ms: 200) == 0
    assert asked.info()["apart"] == {"too many requests": 1, "a feature": 1}, "no reason where nothing runs"


def test_mixed_pass_is_compared_with_the_measured_round() -> None:
    """The scheduler asks for as many tokens as fit beside it; on a CPU nothing is measured."""
    asked: list[float] = []
    for device, round_ms in (("cuda", 5.0), ("cpu", 0.0)):
        scheduler: Any = SimpleNamespace(
            budget=SimpleNamespace(tokens=lambda running, prompts, more: asked.append(more) or 100),
            mixing=mixing(device, 5.0),
            running=Requests(RUNNING),
            extending=[],
            max_extend_rows=8,
            widths=RoundWidths(1, 1),
            _with_pages=lambda rows, width: rows,
        )
        assert Scheduler._with_decodes(scheduler, 50) == (68, RUNNING)
        assert asked.pop() == round_ms


def test_info_reports_expected_pass_times() -> None:
    asked = mixing("cuda", 1.0)
    assert asked.prompt_tokens(RUNNING, [], lambda ms: 200) == 0
    assert asked.info() == {"apart": {"slower": 1}, "expected_ms": {"mixed": 50.0, "extend": 48.0, "round": 1.0}}


def test_mixed_pass_fills_its_graph_from_waiting_prompts() -> None:
    asked = mixing("cuda", 5.0)
    asked._runner.tokens_filling_graph = lambda tokens, room: 128  # type: ignore[method-assign]
    prompt: Any = SimpleNamespace(states={}, tokens=[0] * 1000, extended=0)
    assert asked.prompt_tokens(RUNNING, [prompt], lambda ms: 200) == 128
    prompt.extended = 850
    assert asked.prompt_tokens(RUNNING, [prompt], lambda ms: 200) == 168, "all that is left"


@pytest.mark.parametrize(
    ("device", "asked", "spec", "mixes"),
    [
        ("cuda", None, None, True),
        ("cpu", None, None, False),
        ("cpu", True, None, True),
        ("cuda", False, None, False),
        ("cuda", None, SpeculativeConfig("none"), True),
        ("cuda", None, SpeculativeConfig("ngram", adaptive=True), True),
        ("cuda", None, SpeculativeConfig("ngram", adaptive=False), False),
    ],
)
def test_default_of_enable_mixed_chunk(
    device: str, asked: bool | None, spec: SpeculativeConfig | None, mixes: bool
) -> None:
    """By default engines on a GPU do, but not where every round drafts."""
    facts: Any = SimpleNamespace(dtype=torch.bfloat16, config=SimpleNamespace(max_positions=4096, whole_text=False))
    hardware = Hardware(torch.device(device), device, 1 << 30)
    config = resolve(EngineConfig(enable_mixed_chunk=asked, speculative=spec), hardware, facts)
    assert bool(decode_sizes(config)) is mixes
    decided = [decision.name for decision in config.decisions]
    assert ("enable_mixed_chunk" in decided) is (asked is None), "explain tells of a default"
