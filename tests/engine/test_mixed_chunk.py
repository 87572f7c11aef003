"""Running requests that decode in the prompt passes of others: the same bytes, no round between, every pass counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import counted, draw_pauses, engine, mixed_params, prompts, tokens
from tests.engine.matrix import DRAFTERS, PARAMS, PROMPTS, Checkpoints
from tests.kv.mixed_model import ARCHITECTURE, VOCAB, make_mixed
from tests.models.hybrids import FULL, LINEAR
from tests.models.make import make_checkpoint
from tests.models.make_adapters import make_adapter
from unisono.attention.base import AttentionInputs
from unisono.config import catalog
from unisono.engine.scheduling.mixing import Mixing
from unisono.engine.sequence import Extend, Round
from unisono.entrypoints.llm import LLM
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.types import EngineRequest, FinishReason, SamplingParams, SpeculativeConfig, StructuredOutputs
from unisono.types.lora import LoRARequest

GRAPH = "full" if torch.cuda.is_available() else "tape"
MANY, WANTED = prompts(12, 250), mixed_params(12)
LONGER = mixed_params(8, max_tokens=40)
MIXED: dict[str, Any] = {"enable_mixed_chunk": True, "max_num_batched_tokens": 24, "dtype": "float32"}


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU passes are mixed where that is measured to pay. For small models it may not; here it always does."""
    monkeypatch.setattr(Mixing, "pays", lambda *_: True)


def mixed_passes(llm: LLM) -> dict[str, int]:
    """How many there were, by kind."""
    return {kind: count for (program, kind, _), count in counted(llm).items() if program == "mixed"}


@pytest.fixture(scope="module")
def alone(qwen3: Path) -> list[list[int]]:
    """Each request by itself: eager, no batch, its whole prompt in one pass."""
    with engine(qwen3, max_num_seqs=1, enforce_eager=True, dtype="float32") as llm:
        return [tokens(llm, [p], [q])[0] for p, q in zip(MANY, WANTED, strict=True)]


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 40, "max_num_seqs": 12},
        pytest.param({"max_num_batched_tokens": 128}, marks=pytest.mark.full),
        pytest.param({"enforce_eager": True}, marks=pytest.mark.full),
        pytest.param({"graphs": "segmented"}, marks=pytest.mark.full),
        pytest.param({"attention_backend": "torch"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_same_bytes(qwen3: Path, alone: list[list[int]], flags: dict[str, Any]) -> None:
    expected = alone
    if "attention_backend" in flags:
        with engine(qwen3, max_num_seqs=1, dtype="float32", **flags) as llm:
            expected = [tokens(llm, [p], [q])[0] for p, q in zip(MANY, WANTED, strict=True)]
    with engine(qwen3, **{**MIXED, **flags}) as llm:
        while GRAPH == "full" and llm.engine.capture_missing():
            pass
        assert tokens(llm, MANY, WANTED) == expected
        assert tokens(llm, MANY, WANTED) == expected, "after prefix hits"
        found = mixed_passes(llm)
        assert sum(found.values()) > 8
        kind = {"enforce_eager": "eager", "graphs": f"{GRAPH}-segmented".removeprefix("full-")}
        wanted = {kind.get(next(iter(flags)), GRAPH)}
        some = {"eager"} if GRAPH == "full" else set()  # sizes that pay on a GPU are captured when it is idle
        assert wanted <= set(found) <= wanted | some or "attention_backend" in flags
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


def test_preemption(qwen3: Path) -> None:
    with engine(qwen3, max_num_seqs=1, dtype="float32") as llm:
        expected = [tokens(llm, [p], [q])[0] for p, q in zip(MANY, LONGER, strict=False)]
    with engine(qwen3, **MIXED, max_model_len=128, num_pages=1 + 10) as llm:
        assert tokens(llm, MANY[:8], LONGER) == expected
        assert llm.engine.scheduler.preemptions >= 3
        assert mixed_passes(llm)
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


# ---- drafters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [each if each in ("eagle3", "ngram") else pytest.param(each, marks=pytest.mark.full) for each in DRAFTERS]
)
def test_drafter_observes_every_token_of_mixed_passes(
    method: str,
    checkpoints_of: Callable[[str], Checkpoints],
    plain: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its drafts after a mixed pass are those after a round: as many are accepted, and the text is the same."""
    draw_pauses(monkeypatch)
    target, model = checkpoints_of(method)
    spec = SpeculativeConfig(method, None if model is None else str(model), 3)
    with engine(target, speculative=spec, adaptive=True, enable_mixed_chunk=True, max_num_batched_tokens=40) as llm:
        for _ in range(2):
            assert tokens(llm, PROMPTS[:12], PARAMS[:12]) == plain(target, 12)
        assert mixed_passes(llm)
        assert llm.engine.counters.accepted_tokens > 0
        llm.engine.check_integrity()


def test_drafts_after_mixed_passes_are_those_after_rounds(
    checkpoints_of: Callable[[str], Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's first drafts after nine undrafted tokens, committed by rounds or by prompt passes of another one."""
    target, model = checkpoints_of("eagle3")
    spec, drawn = SpeculativeConfig("eagle3", str(model), 3), {}
    long = prompts(1, 250, low=200, high=201, seed=4)[0]
    for mixing in (False, True):
        flags = {"enable_mixed_chunk": mixing, "max_num_batched_tokens": 24, "dtype": "float32"}
        with engine(target, speculative=spec, adaptive=True, **flags) as llm:
            llm.engine.pin_drafts(0)
            llm.engine.add(request("runs", MANY[0], 40))
            step_until(llm, "runs", 1)
            if mixing:
                llm.engine.add(request("long", long, 1))
            step_until(llm, "runs", 10)
            assert bool(mixed_passes(llm)) is mixing
            llm.engine.abort("long")
            llm.engine.pin_drafts(3)
            drafter, seen = llm.engine.worker.drafter, []
            real = drafter.propose

            def propose(slots: torch.Tensor, drafts: torch.Tensor, real: Any = real, seen: list = seen) -> None:
                real(slots, drafts)
                seen.append(drafts[0].tolist())

            llm.engine.runner.planner.enabled = False  # so that the rounds' Python runs
            monkeypatch.setattr(drafter, "propose", propose)
            step_until(llm, "runs", 30)
            drawn[mixing] = seen[:4]
    assert drawn[True] == drawn[False]
    assert any(token >= 0 for drafts in drawn[True] for token in drafts)


def request(name: str, prompt: list[int], most: int, **params: Any) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(**{"temperature": 0, "seed": 1, **params}, max_tokens=most))


def step_until(llm: LLM, name: str, count: int) -> None:
    """Run the engine until this request has this number of tokens."""
    sequence = llm.engine._sequences[name]
    while len(sequence.tokens) - sequence.prompt_len < count:
        llm.engine.step()


# ---- other state ------------------------------------------------------------------------------------


@pytest.mark.full
def test_recurrent_layers(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
    path = make_checkpoint(tmp_path / "target", "qwen3_5_text", tokenizer=False, **layers)
    check_alike(path, [p[: 3 + i] * 6 if i % 2 else p for i, p in enumerate(prompts(8, 256, high=70, seed=8))])


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.full)])
def test_windows_head_sizes_and_a_recurrence(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.models.entries, ARCHITECTURE, "tests.kv.mixed_model:MIXED")  # type: ignore[arg-type]
    check_alike(make_mixed(tmp_path), prompts(count, VOCAB, low=30, high=70, seed=8), scarce=count == 8)


def check_alike(path: Path, asked: list[list[int]], scarce: bool = True) -> None:
    """The same text and the same hits of the prefix cache with and without mixed passes, pages scarce and not."""
    params = mixed_params(len(asked), max_tokens=36)
    said, found = [], []
    ways: list[dict[str, Any]] = [{"enable_mixed_chunk": False}, {}, *([{"num_pages": 18}] if scarce else [])]
    for flags in ways:
        with engine(path, **{**MIXED, **flags}, max_num_seqs=5) as llm:
            said.append(tokens(llm, asked, params))
            assert tokens(llm, asked, params) == said[0]
            assert bool(mixed_passes(llm)) is ("enable_mixed_chunk" not in flags)
            assert bool(llm.engine.scheduler.preemptions) is ("num_pages" in flags)
            texts = [p + answer[:-1] + [5, 6] for p, answer in zip(asked, said[0], strict=True)]
            found.append([llm.generate([text], params[0])[0].num_cached_tokens for text in texts])
            llm.engine.check_integrity()
    assert all(each == said[0] for each in said)
    assert found[0] == found[1]
    assert sum(found[1]) > 16 * len(asked)


def test_inputs_of_a_mixed_pass_split_into_prompt_and_round() -> None:
    """Joined inputs come apart again, and recurrences of rows that decode move their snapshots as a round does."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    table, seen = torch.zeros(5, 8, dtype=torch.int32), ints(16, 32, 0, 16, 0)
    decoding = AttentionInputs(ints(0, 1, 4), ints(31, 40, -1), ints(7, 8, 0), ints(32, 41, 0), table, 1)
    starts = ints(0, 3, 17)
    prompts = AttentionInputs(
        ints(2, 3), ints(*range(3), *range(18, 32)), ints(*range(17)), ints(3, 32), table, None, starts
    )
    joined = AttentionInputs.joined(decoding, prompts)
    assert joined.query_start is not None
    assert joined.query_start.tolist() == [0, 1, 2, 3, 6, 20]
    for part, given in zip(joined.parts(), (decoding, prompts), strict=True):
        for name in ("slots", "positions", "slot_mapping", "kv_len"):
            assert torch.equal(getattr(part, name), getattr(given, name))
        assert part.width == given.width
    assert torch.equal(joined.parts()[1].query_start, starts)  # type: ignore[arg-type]

    def told(i: AttentionInputs) -> RecurrentPass:
        return RecurrentPass.of(i.slots, i.positions, i.kv_len, i.query_start, seen, i.singles)

    apart = zip(told(decoding).fields, told(prompts).fields, strict=True)
    assert all(torch.equal(one, torch.cat(two)) for one, two in zip(told(joined).fields, apart, strict=True))
    assert told(joined).until.tolist() == [16, 32, 0, 0, 32]


# ---- scheduling -------------------------------------------------------------------------------------


def test_a_stream_has_a_token_of_every_prompt_pass(qwen3: Path) -> None:
    with engine(qwen3, **{**MIXED, "max_stall_ms": 1}) as llm:
        llm.engine.add(request("runs", [1, 2, 3], 40, ignore_eos=True))
        for i in range(7):
            llm.engine.add(request(f"long{i}", prompts(1, 250, low=200, high=210, seed=i)[0], 2, ignore_eos=True))
        gaps, since = [], 0
        while llm.engine.has_work():
            since += 1
            for delta in llm.engine.step():
                if delta.request_id == "runs":
                    gaps.append(since)
                    since = 0
        assert max(gaps[1:40]) == 1
        launched = counted(llm)
        assert launched["mixed", GRAPH, ""] >= 35
        assert "mixed" in {row["program"] for row in llm.engine.info()["graphs"]}


TEXTS = ["Tom has 3 boxes.", *(f"Question {i}: how many apples are in {i} boxes of 7?" for i in range(12))]
PLAIN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ASKED: dict[str, SamplingParams] = {
    "logprobs": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
    "all logprobs": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=-1),
    "grammar": SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputs(regex="[a-z]{24}")),
}


@pytest.mark.parametrize(
    "asked", ["logprobs", *(pytest.param(each, marks=pytest.mark.full) for each in ("all logprobs", "grammar"))]
)
def test_features(asked: str) -> None:
    """Log-probabilities come with mixed passes. A grammar needs rounds; when it has ended the others mix again."""
    answers, kinds = {}, set()
    for mixing in (False, True):
        flags = {"enable_mixed_chunk": mixing, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_logprobs": -1}
        with engine("tiny", **flags) as llm:
            launch = llm.engine._launch

            def watched(work: Any, launch: Any = launch, llm: LLM = llm) -> Any:
                if isinstance(work, Extend | Round):
                    featured = any(s.states for s in llm.engine.scheduler.active)
                    kinds.add((featured, isinstance(work, Extend) and bool(work.decodes)))
                return launch(work)

            llm.engine._launch = watched  # type: ignore[method-assign]
            outputs = llm.generate(TEXTS, [ASKED[asked], *[PLAIN] * 12])
            answers[mixing] = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
    assert answers[True] == answers[False]
    assert ((True, True) in kinds) is (asked != "grammar")
    assert (False, True) in kinds


def test_adapters(qwen3: Path, tmp_path: Path) -> None:
    """Rows with adapters decode beside prompts with others."""
    made = [make_adapter(tmp_path / str(n), qwen3, n, size=1.0) for n in (1, 2)]
    asked = [None, *(LoRARequest(path.name, n, str(path)) for n, path in enumerate(made, 1))] * 4
    flags = {"enable_lora": True, "max_loras": 2, "dtype": "float32"}
    with engine(qwen3, **flags, max_num_seqs=1) as llm:
        alone = [o.outputs[0].token_ids for o in llm.generate(MANY[:12], WANTED[:12], lora_request=asked)]
    with engine(qwen3, **{**MIXED, **flags}, max_num_seqs=4) as llm:
        outputs = llm.generate(MANY[:12], WANTED[:12], lora_request=asked)
        assert [o.outputs[0].token_ids for o in outputs] == alone
        assert mixed_passes(llm)
        assert tokens(llm, MANY[1:3], WANTED[1:3]) != alone[1:3], "adapters change the text"


def test_aborts(qwen3: Path, alone: list[list[int]]) -> None:
    """Requests leave while they decode in prompt passes; the others' bytes stay, and no page stays in use."""
    rng = random.Random(3)
    with engine(qwen3, **MIXED) as llm:
        for i, (prompt, params) in enumerate(zip(MANY, WANTED, strict=True)):
            llm.engine.add(EngineRequest(str(i), prompt, params))
        texts: dict[str, list[int]] = {str(i): [] for i in range(18)}
        gone, ended = set[str](), set[str]()
        while llm.engine.has_work():
            for delta in llm.engine.step():
                texts[delta.request_id] += delta.token_ids
                if delta.finish is not FinishReason.RUNNING:
                    ended.add(delta.request_id)
            running = [s.request.request_id for s in llm.engine.scheduler.running]
            if running and len(gone) < 6 and rng.random() < 0.2:
                gone.add(leaves := rng.choice(running))
                llm.engine.abort(leaves)
        assert len(gone) == 6
        assert mixed_passes(llm)
        for i, expected in enumerate(alone):
            text = texts[str(i)]
            assert text == (expected if str(i) in ended else expected[: len(text)])
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0
