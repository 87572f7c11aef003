"""Hybrids over long texts: a needle and a tool call after cached prefixes, and outputs of 2,100 tokens.

Text with MTP and prefix hits is that without speculation and without a prefix cache (in vLLM it was not, issue 47194).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine, prompts, tokens
from tests.models.hybrid_mtp import with_module
from tests.models.hybrids import FULL, LINEAR
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.kv.specs import PAGE_SIZE
from unisono.types import SamplingParams, SpeculativeConfig, StructuredOutputs

MTP = SpeculativeConfig("mtp", num_speculative_tokens=3)
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "max_position_embeddings": 4096,
}

NEEDLE = "The code of the green door is 7421."
STORY = "Tom walks to the market with 3 apples and 5 pears. Mia counts 12 pens in each of 4 boxes. "
TOOL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["open_door", "close_door"]},
        "arguments": {
            "type": "object",
            "properties": {"code": {"type": "integer", "minimum": 1000, "maximum": 9999}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
ASK = SamplingParams(temperature=0, max_tokens=24)
CALL = SamplingParams(
    temperature=0.8,
    seed=6,
    max_tokens=64,
    structured_outputs=StructuredOutputs(json=TOOL, disable_any_whitespace=True),
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with an MTP module and a tokenizer of bytes."""
    path = make_checkpoint(tmp_path_factory.mktemp("hybrid") / "target", "qwen3_5_text", **LAYERS)
    return with_module(path).path


@dataclass
class Talk:
    """What came of one conversation: the answers' tokens, the tool call's text, and cached tokens of each prompt."""

    answers: list[list[int]]
    calls: list[str]
    cached: list[int]
    lengths: list[int]


def talk(llm: LLM, copies: int) -> Talk:
    """A long text with a needle in its middle is asked about twice; the answer and a request for a tool call follow."""
    asked = f"{STORY * copies}{NEEDLE} {STORY * copies}\nWhat is the code of the green door?"
    history = [{"role": "user", "content": asked}]
    found = Talk([], [], [], [])
    for _ in range(2):
        (output,) = llm.chat(history, ASK)
        found.answers.append(output.outputs[0].token_ids)
        found.cached.append(output.num_cached_tokens)
        found.lengths.append(len(output.prompt_token_ids))
    history += [
        {"role": "assistant", "content": output.outputs[0].text},
        {"role": "user", "content": "Open the door: call the tool."},
    ]
    for _ in range(2):
        (output,) = llm.chat(history, CALL)
        found.calls.append(output.outputs[0].text)
        found.cached.append(output.num_cached_tokens)
        found.lengths.append(len(output.prompt_token_ids))
    return found


@pytest.mark.parametrize("model", ["random", "tiny-hybrid"])
def test_a_needle_and_a_tool_call_behind_cached_prefixes(model: str, hybrid: Path) -> None:
    path, copies = (hybrid, 4) if model == "random" else (model, 10)
    flags: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 1, "max_num_batched_tokens": 256}
    with engine(path, **flags, enable_prefix_caching=False, enforce_eager=True) as llm:
        plain = talk(llm, copies)
    with engine(path, **flags, speculative=MTP) as llm:
        drafted = talk(llm, copies)
        assert llm.engine.counters.drafted_tokens > 0
        llm.engine.check_integrity()
    assert plain.cached == [0] * 4
    assert min(plain.lengths) > 600
    assert drafted.answers == plain.answers
    assert drafted.calls == plain.calls
    assert drafted.answers[0] == drafted.answers[1]
    assert drafted.calls[0] == drafted.calls[1]
    call = json.loads(drafted.calls[0])
    assert call["name"] in ("open_door", "close_door")
    assert 1000 <= call["arguments"]["code"] <= 9999
    whole = [(length - 1) // PAGE_SIZE * PAGE_SIZE for length in drafted.lengths]
    assert [drafted.cached[1], drafted.cached[3]] == [whole[1], whole[3]]
    assert drafted.cached[2] > 600


@pytest.mark.full
def test_outputs_of_2100_tokens(hybrid: Path) -> None:
    """Drawn and greedy, and requests that go on from their cached ends. Of four tokens, so that drafts are accepted."""
    batch = prompts(2, 256, low=40, high=60, seed=3)
    common: dict[str, Any] = {"seed": 2, "ignore_eos": True, "allowed_token_ids": (7, 8, 9, 10)}
    params = [SamplingParams(temperature=t, max_tokens=2100, **common) for t in (0.9, 0.0)]
    flags: dict[str, Any] = {"max_model_len": 2192, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    with engine(hybrid, **flags) as llm:
        plain = tokens(llm, batch, [replace(each, max_tokens=2120) for each in params])
    with engine(hybrid, **flags, speculative=MTP) as llm:
        assert tokens(llm, batch, params) == [answer[:2100] for answer in plain]
        assert llm.engine.counters.accepted_tokens > 300
        said = [prompt + answer[:2100] for prompt, answer in zip(batch, plain, strict=True)]
        more = llm.generate(said, [replace(each, max_tokens=20) for each in params])
    assert [output.outputs[0].token_ids for output in more] == [answer[2100:] for answer in plain]
    assert [o.num_cached_tokens for o in more] == [(len(text) - 1) // PAGE_SIZE * PAGE_SIZE for text in said]
