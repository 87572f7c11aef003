"""Start-up test of speculation: check that the target accepts the drafter's drafts on ordinary text.

A draft head that was loaded wrongly, or made for another target, changes no text and passes every check of shapes, but
its drafts are rejected. Before the engine takes requests it continues a few texts greedily and looks at the acceptance
rate of first drafts. It warns if a random draft would do as well. Slots, prefix tree and counters are reset afterwards.
Called by ``engine`` once, at start.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from unisono.config import ResolvedConfig
from unisono.engine.report import Counters
from unisono.engine.worker.runner import Runner
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.vocabulary import encode
from unisono.types import EngineRequest, SamplingParams

logger = logging.getLogger(__name__)

NAME = "draft self-test"

PLAUSIBLE = 0.05
"""Acceptance rate of first drafts that a constant draft may reach. Heads that fit the target exceed 0.3."""

PROMPT_TOKENS, NEW_TOKENS = 64, 17
"""Tokens of each text, at most, and tokens generated after it: one by the prompt pass, 16 by rounds."""

TEXTS = (
    "The river bends twice before it reaches the village. On the outer bank the water is deep and fast, so children "
    "are told to stay on the other side, where the stones are flat and the current is slow. In spring the meadow "
    "behind the mill stands under water, and",
    "To bake a simple bread you need flour, water, salt and yeast. First stir the yeast into a cup of warm water and "
    "wait for ten minutes. Then add the flour and the salt, and knead the dough until it is smooth. Cover the bowl "
    "with a cloth and let it rest for an hour. After that, heat the",
    "def mean(values):\n    total = 0\n    for value in values:\n        total = total + value\n    return total / "
    "len(values)\n\n\ndef variance(values):\n    center = mean(values)\n    total = 0\n    for value in values:\n",
    "Question: A shop sells pencils for 2 dollars each and notebooks for 5 dollars each. Ben buys 4 pencils and 3 "
    "notebooks. How much does he pay in all?\nAnswer: The pencils cost 4 * 2 =",
)


class Tested(Protocol):
    """Engine interface that the test uses."""

    runner: Runner
    checkpoint: Checkpoint
    counters: Counters

    @property
    def config(self) -> ResolvedConfig: ...
    def add(self, request: EngineRequest) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> object: ...


def run_self_test(engine: Tested) -> bool:
    """Run the test if the drafter has one, and add the outcome to the engine's decisions.

    Return True if requests ran; the engine then has to reset itself.
    """
    test = engine.runner.worker.drafter.self_test
    if test is None:
        return False
    prompts = _prompts(engine)
    if isinstance(prompts, str):
        logger.info("No %s: %s.", NAME, prompts)
        engine.runner.decide(NAME, "skipped", prompts)
        return False
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        most = min(NEW_TOKENS, engine.config.max_model_len - len(prompt))
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, seed=0)
        engine.add(EngineRequest(f"self-test-{number}", prompt, params))
    while engine.has_work():
        engine.step()
    engine.runner.seconds["self-test"] = round(time.perf_counter() - started, 3)
    counted = engine.counters
    share = counted.accepted_per_position[0] / max(1, counted.drafts)
    value = f"{share:.0%} of {counted.drafts} first drafts accepted"
    reason = f"{len(prompts)} texts continued greedily, {counted.accept_length:.2f} tokens a round"
    if share < PLAUSIBLE:
        reason += f"; a drafter that fits reaches more. Likely causes: {test.causes}"
        logger.warning(
            "Speculation will cost time and gain none: on ordinary text, %s. Answers stay right. Likely causes: %s.",
            value, test.causes,
        )  # fmt: skip
    engine.runner.decide(NAME, value, reason)
    return True


def _prompts(engine: Tested) -> list[list[int]] | str:
    """Return the texts' token ids, truncated to fit; or the reason why there are none."""
    config, test = engine.config, engine.runner.worker.drafter.self_test
    if test is not None and test.skip is not None:
        return test.skip
    if config.requested.load_format == "dummy":
        return "the target's weights are random (--load-format dummy)"
    if config.requested.synthetic:
        return "acceptance is synthetic"
    if config.requested.graph_capture == "lazy":
        return "--graph-capture lazy starts without it"
    prompts = encode(engine.checkpoint.path, TEXTS)
    if prompts is None:
        return "the checkpoint has no tokenizer, so there is no text"
    longest = min(PROMPT_TOKENS, config.max_model_len - NEW_TOKENS)
    if longest < NEW_TOKENS:
        return f"a context of {config.max_model_len} tokens is too short for it"
    if any(token >= engine.checkpoint.config.vocab_size for prompt in prompts for token in prompt):
        return "the tokenizer makes ids that the model lacks"
    return [prompt[:longest] for prompt in prompts]
