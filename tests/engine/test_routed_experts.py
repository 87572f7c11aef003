"""Experts of tokens for router replay: transformers' choices, the same ids in any batch, of committed tokens only."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.helpers import counted, draw_drafts, engine, idle, lazy_engine, mixed_params, prompts
from unisono.types import BadRequest, RequestOutput, SamplingParams, SpeculativeConfig, TokenDelta
from unisono.types.expert_ids import ExpertIds

PROMPTS = prompts(5, 250, low=3, high=60)
NARROW = [replace(p, allowed_token_ids=(40, 41, 42)) for p in mixed_params(5)]  # so that n-grams are accepted
ASKING = [replace(p, return_routed_experts=True) for p in NARROW]
TREE = {"method": "ngram", "num_speculative_tokens": 3, "topk": 2, "num_draft_tokens": 6}
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=3)
WAYS: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "drafts": {"speculative": NGRAM, "max_num_batched_tokens": 24},
    "tree": {"speculative": SpeculativeConfig.parse(TREE)},
    "preemption": {"speculative": NGRAM, "max_model_len": 112, "num_pages": 1 + 8},
}


def rows(output: RequestOutput, index: int = 0) -> np.ndarray:
    """Ids [prompt + output - 1, layers, top_k]: of everything that was computed."""
    return np.concatenate((output.prompt_routed_experts, output.outputs[index].routed_experts))


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert np.array_equal(rows(one), rows(other))


@pytest.fixture(scope="module")
def moe(checkpoints: dict[str, Path]) -> Path:
    """Experts in every layer."""
    return checkpoints["qwen3_moe"]


@pytest.fixture(scope="module")
def alone(moe: Path) -> list[RequestOutput]:
    """Each request by itself, without drafts and graphs."""
    with engine(moe, enforce_eager=True, dtype="float32") as llm:
        return [llm.generate([p], [q])[0] for p, q in zip(PROMPTS, ASKING, strict=True)]


@torch.inference_mode()
def test_ids_are_those_of_transformers(moe: Path, alone: list[RequestOutput]) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32).eval()
    top_k = model.config.num_experts_per_tok
    for output in alone:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        wanted = torch.stack([layer.topk(top_k).indices for layer in logits], 1)
        found = rows(output)
        assert found.dtype == np.uint8
        assert found.shape == (len(ids), model.config.num_hidden_layers, top_k)
        assert found.tolist() == wanted.tolist()
        assert len(output.prompt_routed_experts) == len(output.prompt_token_ids)


@pytest.mark.parametrize("way", WAYS)
def test_same_ids(moe: Path, alone: list[RequestOutput], way: str) -> None:
    with lazy_engine(moe, dtype="float32", **WAYS[way]) as llm:
        assert_same(llm.generate(PROMPTS, ASKING), alone)
        idle(llm)
        some = llm.generate(PROMPTS, [p if i % 2 else q for i, (p, q) in enumerate(zip(NARROW, ASKING, strict=True))])
        assert_same(some[::2], alone[::2])
        assert all(one.prompt_routed_experts is one.outputs[0].routed_experts is None for one in some[1::2])
        assert "speculative" not in WAYS[way] or llm.engine.counters.accepted_tokens > 0
        assert way != "preemption" or llm.engine.scheduler.preemptions > 0
        replayed = {program for program, kind, _ in counted(llm) if kind != "eager"}
        assert {"extend", "round"} <= replayed
        llm.engine.check_integrity()


def test_a_report_shows_shapes(alone: list[RequestOutput]) -> None:
    assert "routed_experts=<tensor [" in repr(alone[0])


def test_same_ids_in_shared_rounds(moe: Path, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different widths: ids are found at the places of their tokens."""
    draw_drafts(monkeypatch, lambda rng, choices: random.Random.choice(rng, choices[1:-1]))
    spec = SpeculativeConfig("ngram", None, 5, share_drafts=True)
    with lazy_engine(moe, dtype="float32", speculative=spec, adaptive=True) as llm:
        assert_same(llm.generate(PROMPTS, ASKING), alone)
        assert any(program.startswith("shared_round_") for program, _, _ in counted(llm))
        assert llm.engine.counters.accepted_tokens > 0


def test_sequences_of_a_prompt_and_its_later_part(moe: Path) -> None:
    """The first sequence has the prompt's ids. From a start on, the prefix cache serves the tokens before it."""
    prompt = prompts(1, 250, low=64, high=65)[0]
    params = SamplingParams(seed=3, max_tokens=5, n=3, ignore_eos=True, return_routed_experts=True)
    with lazy_engine(moe, dtype="float32") as llm:
        whole = llm.generate([prompt], params)[0]
        assert whole.num_cached_tokens == 0
        assert [len(one.routed_experts) for one in whole.outputs] == [4] * 3
        later = llm.generate([prompt], replace(params, routed_experts_prompt_start=40))[0]
        beyond = llm.generate([prompt], replace(params, routed_experts_prompt_start=99))[0]
    assert later.num_cached_tokens == 32
    assert np.array_equal(later.prompt_routed_experts, whole.prompt_routed_experts[40:])
    assert len(beyond.prompt_routed_experts) == 0
    for other in (later, beyond):
        for one, same in zip(whole.outputs, other.outputs, strict=True):
            assert np.array_equal(one.routed_experts, same.routed_experts)


def test_layers_without_experts_have_no_ids(checkpoints: dict[str, Path]) -> None:
    with lazy_engine(checkpoints["glm4_moe"], hf_overrides={"first_k_dense_replace": 1}, load_format="dummy") as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, return_routed_experts=True)
        (output,) = llm.generate([PROMPTS[0]], params)
        layers = llm.engine.checkpoint.config.num_layers
        assert llm.engine.info()["routed_experts"] == {"layers": [*range(1, layers)], "top_k": 3}
        assert output.prompt_routed_experts.shape == (len(PROMPTS[0]), layers - 1, 3)
        assert all(len(set(choice)) == 3 for token in rows(output).tolist() for choice in token)


def test_deltas_add_up(moe: Path, alone: list[RequestOutput]) -> None:
    with lazy_engine(moe, dtype="float32", speculative=NGRAM) as llm:
        first, *others = list[TokenDelta](llm.stream(PROMPTS[1], ASKING[1]))
        for later in others:
            first.absorb(later)
    assert first.routed_experts is not None
    assert first.prompt_routed_experts is not None
    assert np.array_equal(first.prompt_routed_experts.array(), alone[1].prompt_routed_experts)
    assert np.array_equal(first.routed_experts.array(), alone[1].outputs[0].routed_experts)


def test_ids_above_255_take_two_bytes() -> None:
    ids = np.arange(12, dtype=np.uint16).reshape(2, 3, 2) + 300
    packed = ExpertIds("uint16", 3, 2, ids.tobytes())
    assert np.array_equal(packed.head(1).array(), ids[:1])
    assert np.array_equal(packed.joined(packed).array(), np.concatenate((ids, ids)))


def test_models_without_experts_are_refused(qwen3: Path) -> None:
    with (
        lazy_engine(qwen3) as llm,
        pytest.raises(BadRequest, match="return_routed_experts: the model has no MoE layers"),
    ):
        llm.generate([PROMPTS[0]], SamplingParams(return_routed_experts=True))
