"""The kinds of graphs of the test matrix, and what its requests have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.engine.helpers import prompts
from tests.graphs.programs import COMPILED, FULL, SEGMENTED
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams


@dataclass(frozen=True)
class Kind:
    """A way to capture passes, and the resulting kind of each program. ``backend``: eager runs use it too."""

    flags: dict[str, Any]
    extend: str
    round: str
    backend: str = "auto"

    def of(self, program: str, method: str) -> str:
        if program == "draft" and method in ("ngram", "suffix") and self.round == SEGMENTED:
            return FULL  # what looks drafts up has no attention to break at
        return self.round if program in ("round", "draft", "verify") else self.extend


KINDS = {
    "full": Kind({"graphs": "full"}, FULL, FULL),
    "segmented": Kind({"graphs": "segmented"}, SEGMENTED, SEGMENTED),
    "compiled": Kind({"graphs": "full", "compile": True}, COMPILED, COMPILED),
    "compiled segments": Kind({"graphs": "segmented", "compile": True}, COMPILED, COMPILED),
    "mixed": Kind({"graphs": "extend=segmented,score=segmented,round=full"}, SEGMENTED, FULL),
    "only rounds": Kind({"graphs": "extend=off,score=off,round=full"}, "eager", FULL),
    "planned on the host": Kind({"graphs": "segmented"}, SEGMENTED, SEGMENTED, "torch"),
}


def say(llm: LLM, batch: list[Any], **params: Any) -> list[Any]:
    """Everything that comes of a batch of greedy and sampled requests, by turns."""
    each = [
        SamplingParams(**{"temperature": i % 2, "seed": i, "max_tokens": 7 + i % 3, "ignore_eos": True, **params})
        for i in range(len(batch))
    ]
    outputs = llm.generate(batch, each)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs, states(o)) for o in outputs]


def states(output: Any) -> Any:
    """The hidden states of prompt and answer, to the bit; None where they were not asked for."""
    given = output.prompt_hidden_states, output.outputs[0].hidden_states
    return None if given[0] is None else torch.cat(given).tolist()


def text(length: int, seed: int = 0) -> list[int]:
    """A prompt that repeats itself: drafters find something in it."""
    return (prompts(1, 250, 4, 5, seed=seed)[0] * length)[:length]
