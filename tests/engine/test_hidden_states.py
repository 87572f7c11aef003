"""Hidden states for the caller: transformers' last ones, whatever else goes on, and the same bytes with and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.helpers import counted, draw_drafts, engine, idle, lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import DRAFTERS
from unisono.entrypoints.llm import LLM
from unisono.types import (
    BadRequest,
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputs,
    TokenDelta,
)

PROMPTS = prompts(9, 250, low=3, high=70)
FORM = StructuredOutputs(regex="([a-d]{2}-){3}")  # so that rounds without masks follow
PARAMS = mixed_params(9)
NARROW = [  # drafters are right now and then
    replace(p, structured_outputs=FORM) if i in (2, 5) else replace(p, allowed_token_ids=(40, 41, 42))
    for i, p in enumerate(PARAMS)
]
GRAPH = "full" if torch.cuda.is_available() else "tape"


def asking(params: list[SamplingParams], every: int = 1) -> list[SamplingParams]:
    """Every such request asks for its hidden states."""
    return [replace(p, return_hidden_states=i % every == 0) for i, p in enumerate(params)]


def states(output: RequestOutput, index: int = 0) -> torch.Tensor:
    """[prompt + output - 1, H]: of everything that was computed."""
    return torch.cat((output.prompt_hidden_states, output.outputs[index].hidden_states))


@torch.inference_mode()
def assert_reference(path: Path, outputs: list[RequestOutput]) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        wanted = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        assert output.prompt_hidden_states.shape[0] == len(output.prompt_token_ids)
        torch.testing.assert_close(states(output), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        pytest.param({"max_num_batched_tokens": 37, "graphs": "segmented"}, marks=pytest.mark.full),
        pytest.param({"enforce_eager": True}, marks=pytest.mark.full),
        {"speculative": SpeculativeConfig("ngram", num_speculative_tokens=3)},
    ],
    ids=["batched", "chunks of 16", "chunks of 37, segmented", "eager", "drafted"],
)
def test_hidden_states_match_transformers(qwen3: Path, flags: dict[str, Any]) -> None:
    with engine(qwen3, dtype="float32", **flags) as llm:
        plain = tokens(llm, PROMPTS, NARROW)
        first = llm.generate(PROMPTS, asking(NARROW))
        assert [o.outputs[0].token_ids for o in first] == plain
        assert_reference(qwen3, first)
        idle(llm)
        again = llm.generate(PROMPTS, asking(NARROW))
        for one, other in zip(first, again, strict=True):
            assert torch.equal(states(one), states(other)), "a replay gives other bits"
        some = llm.generate(PROMPTS, asking(NARROW, every=3))
        for i, (one, other) in enumerate(zip(first, some, strict=True)):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            if i % 3 == 0:
                assert torch.equal(states(one), states(other))
            else:
                assert other.prompt_hidden_states is other.outputs[0].hidden_states is None
        assert not flags.get("speculative") or llm.engine.counters.accepted_tokens > 0
        llm.engine.check_integrity()


def test_hidden_state_graphs_are_captured_when_idle(qwen3: Path) -> None:
    """Starting up captures none, the first passes say why they ran eagerly, and later ones replay."""
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, return_hidden_states=True)]
    with engine(qwen3, graphs="full") as llm:  # whatever a graph saves of so small a model
        assert not any(graph.key.features.returned for graph in llm.engine.runner.planner.graphs())
        llm.generate([PROMPTS[0]], params)
        eager = {key: n for key, n in counted(llm).items() if key[1] == "eager"}
        assert eager == {("extend", "eager", "NOT_CAPTURED"): 1, ("round", "eager", "NOT_CAPTURED"): 8}
        idle(llm)
        llm.generate([PROMPTS[0]], params)
        passes = counted(llm)
        assert {key: passes.pop(key) for key in eager} == eager
        assert passes == {("extend", GRAPH, ""): 1, ("round", GRAPH, ""): 8}
        labels = {row.get("features") for row in llm.engine.runner.planner.report()}
        assert "NULL+returned" in labels


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.full), "ngram"])
def test_preempted(qwen3: Path, method: str) -> None:
    """Whoever resumes computes some states again, and hands out each once."""
    params = asking(mixed_params(9, max_tokens=30))
    with lazy_engine(qwen3, dtype="float32", max_num_seqs=1, enforce_eager=True) as llm:
        alone = [llm.generate([p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    flags: dict[str, Any] = {"max_model_len": 112, "num_pages": 1 + 8}
    with lazy_engine(qwen3, dtype="float32", speculative=SpeculativeConfig(method), **flags) as llm:
        together = llm.generate(PROMPTS, params)
        assert llm.engine.scheduler.preemptions >= 3
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert torch.equal(states(one), states(other))


TREE = {"method": "ngram", "num_speculative_tokens": 3, "topk": 2, "num_draft_tokens": 6}
QUICK = [("eagle3", True), ("tree", True)]
DRAFTED = [(method, adaptive) for method in (*DRAFTERS, "tree") for adaptive in (True, False)]


@pytest.mark.parametrize(
    ("method", "adaptive"), [each if each in QUICK else pytest.param(*each, marks=pytest.mark.full) for each in DRAFTED]
)
def test_drafted(
    method: str, adaptive: bool, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits with every drafter, those of accepted drafts among them, in rounds of any width, masked or not."""
    draw_drafts(monkeypatch)
    narrow = asking(NARROW, every=1 if method == "tree" else 2)
    flags: dict[str, Any] = {"adaptive": adaptive, "max_num_batched_tokens": 40}
    target, model = DRAFTERS.get(method, DRAFTERS["ngram"])(checkpoints, tmp_path)
    with lazy_engine(target, enforce_eager=True) as llm:
        plain = llm.generate(PROMPTS, narrow)
    path = {} if model is None else {"model": str(model)}
    spec = TREE if method == "tree" else {"method": method, "num_speculative_tokens": 3, **path}
    with engine(target, speculative=SpeculativeConfig.parse(spec), **flags) as llm:
        drafted = llm.generate(PROMPTS, narrow)
        assert llm.engine.counters.accepted_tokens > 0
        planner = llm.engine.runner.planner
        keys = {*planner._missing, *(graph.key for graph in planner.graphs())}
        returned = {(key.program, key.shape.width) for key in keys if key.features.returned}
        assert {("round", 4), ("verify", 4)} <= returned
        assert not adaptive or {("round", 1), ("verify", 1)} <= returned
    for one, other, params in zip(plain, drafted, narrow, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert not params.return_hidden_states or torch.equal(states(one), states(other))


@pytest.mark.parametrize(
    "method", [one if one == "eagle3" else pytest.param(one, marks=pytest.mark.full) for one in DRAFTERS]
)
@pytest.mark.parametrize("context", [64, pytest.param(60, marks=pytest.mark.full)])
def test_a_prompt_that_fills_the_context(
    method: str, context: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """It ends without a token, with all its states and scores; drafters are a position ahead of it."""
    target, model = DRAFTERS[method](checkpoints, tmp_path)
    path = {} if model is None else {"model": str(model)}
    spec = SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 3, **path})
    prompt = prompts(1, 250, low=context, high=context + 1)[0]
    params = SamplingParams(temperature=0, max_tokens=1, seed=1, return_hidden_states=True, prompt_logprobs=0)
    with engine(target, speculative=spec, max_model_len=context, max_num_batched_tokens=48) as llm:
        whole = [EngineRequest(f"whole {i}", prompt, params, prompt_only=True) for i in range(2)]
        for request in (*whole, EngineRequest("shorter", prompt[:-1], params)):
            llm.engine.add(request)
        deltas: dict[str, TokenDelta] = {}
        while llm.engine.has_work():
            for delta in llm.engine.step():
                deltas[delta.request_id] = delta
        llm.engine.check_integrity()
        with pytest.raises(BadRequest, match=f"the context of {context} leaves room for {context - 1}"):
            llm.engine.add(EngineRequest("with a token", prompt, params))
        with pytest.raises(BadRequest, match=f"{context + 1} tokens; the model's context is {context} tokens"):
            llm.engine.add(EngineRequest("too long", [*prompt, 1], params, prompt_only=True))
        assert (
            len(llm.generate([prompt[:-9]], SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids) == 9
        )
    first, again, shorter = (deltas[name] for name in ("whole 0", "whole 1", "shorter"))
    assert (first.token_ids, first.finish) == ([], FinishReason.LENGTH)
    assert (len(shorter.token_ids), shorter.finish) == (1, FinishReason.LENGTH)
    for delta, count in ((first, context), (again, context), (shorter, context - 1)):
        assert delta.prompt_hidden_states is not None
        assert delta.prompt_logprobs is not None
        assert len(delta.prompt_logprobs) == count - 1
        states = delta.prompt_hidden_states
        assert len(states.data) % count == 0
        assert states.data[: len(shorter.prompt_hidden_states.data)] == shorter.prompt_hidden_states.data  # type: ignore[union-attr]
    assert first.prompt_hidden_states == again.prompt_hidden_states


def test_hidden_states_disable_prefix_hits(qwen3: Path) -> None:
    """So the cache is not read, but filled; and of several sequences the first computes the prompt."""
    prompt = prompts(1, 250, low=64, high=65)[0]
    params = SamplingParams(seed=3, max_tokens=5, n=3, ignore_eos=True, return_hidden_states=True)
    with engine(qwen3, dtype="float32") as llm:
        plain = llm.generate([prompt], replace(params, return_hidden_states=False))[0]
        output = llm.generate([prompt], params)[0]
        assert output.num_cached_tokens == 0
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in plain.outputs]
        assert [o.hidden_states.shape[0] for o in output.outputs] == [4] * 3
        assert llm.generate([prompt], replace(params, return_hidden_states=False))[0].num_cached_tokens == 48
    assert_reference(qwen3, [output])


def test_hidden_states_end_with_the_text(qwen3: Path) -> None:
    given = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, return_hidden_states=True)
    with engine(qwen3, speculative=SpeculativeConfig("ngram", num_speculative_tokens=3)) as llm:
        whole = llm.generate(["hello hello"], given)[0].outputs[0]
        stop = whole.text[5:7]
        short = llm.generate(["hello hello"], replace(given, stop=(stop,)))[0].outputs[0]
        one = llm.generate(["hello hello"], replace(given, max_tokens=1))[0].outputs[0]
    assert 0 < len(short.token_ids) < 30
    assert torch.equal(short.hidden_states, whole.hidden_states[: len(short.token_ids) - 1])
    assert one.hidden_states.shape == (0, whole.hidden_states.shape[1])


def test_lm_head_of_hidden_states_gives_the_tokens(qwen3: Path) -> None:
    """The last of a prompt's gives the first token."""
    given = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, return_hidden_states=True)
    with engine(qwen3) as llm:
        output = llm.generate([PROMPTS[2]], given)[0]
        model = llm.engine.worker.model
        with torch.inference_mode():
            sampled = model.logits(states(output).to(model.lm_head.weight.device)).argmax(1).tolist()
    assert sampled[len(PROMPTS[2]) - 1 :] == output.outputs[0].token_ids


def test_streamed_deltas_add_up(llm: LLM) -> None:
    given = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, return_hidden_states=True)
    deltas = list(llm.stream(PROMPTS[1], given))
    whole = llm.generate([PROMPTS[1]], given)[0]
    for later in deltas[1:]:
        deltas[0].absorb(later)
    assert deltas[0].hidden_states is not None
    assert deltas[0].prompt_hidden_states is not None
    assert deltas[0].hidden_states.data == whole.outputs[0].hidden_states.numpy().tobytes()
    assert deltas[0].prompt_hidden_states.data == whole.prompt_hidden_states.numpy().tobytes()


@pytest.fixture(scope="module")
def llm(qwen3: Path) -> Any:
    with engine(qwen3, enforce_eager=True, dtype="float32") as llm:
        yield llm


def test_refusals() -> None:
    with pytest.raises(BadRequest, match=r"return_hidden_states='last'.*true or false"):
        SamplingParams(return_hidden_states="last")  # type: ignore[arg-type]
