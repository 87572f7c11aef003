"""Lifecycle: stops, limits, aborts, refusals, fairness, counted passes, memory given back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.engine.helpers import counted, engine, prompts, tokens
from unisono.engine.sequence import Sequence
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, ConfigError, EngineRequest, FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def llm(qwen3: Path):
    with engine(qwen3) as llm:
        yield llm


def request(name: str, prompt: list[int], **params: object) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0, seed=0, **params))  # type: ignore[arg-type]


def run(llm: LLM) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    while llm.engine.has_work():
        for delta in llm.engine.step():
            got.setdefault(delta.request_id, []).extend(delta.token_ids)
    return got


def test_shutdown_frees_the_model(qwen3: Path) -> None:
    """Another engine in this process needs the memory."""
    with engine(qwen3) as llm:
        tokens(llm, prompts(2, 250), GREEDY)
        model = weakref.ref(llm.engine.worker.model)
    assert model() is None


def test_ended_requests_are_freed_at_once(llm: LLM) -> None:
    """Not when a later pass is read, nor when Python looks for cycles: with one go its pictures and its adapter."""
    for number, prompt in enumerate(prompts(3, 250)):
        llm.engine.add(request(f"freed-{number}", prompt, max_tokens=5))
    gc.disable()
    try:
        assert len(run(llm)) == 3
        kept = [o.request.request_id for o in gc.get_objects() if isinstance(o, Sequence)]
    finally:
        gc.enable()
    assert not [name for name in kept if name.startswith("freed-")]


def test_stop_ids_end_a_request_and_are_reported(llm: LLM) -> None:
    prompt = prompts(1, 250)[0]
    free = tokens(llm, [prompt], GREEDY)[0]
    stop = free[7]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    out = llm.generate([prompt], params)[0].outputs[0]
    assert out.token_ids == free[: free.index(stop) + 1]
    assert out.finish_reason == "stop"


def test_max_tokens_and_the_context_end_a_request(llm: LLM) -> None:
    out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (5, "length")
    out = llm.generate([[1] * 250], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (256 - 250, "length")
    assert len(tokens(llm, [[1] * 255], GREEDY)[0]) == 1


def test_stop_strings_end_the_text(llm: LLM) -> None:
    full = llm.generate(["hello"], SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True))[0].outputs[0]
    stop = full.text[4:6]
    params = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True, stop=(stop,))
    out = llm.generate(["hello"], params)[0].outputs[0]
    assert out.text == full.text[: full.text.index(stop)]
    assert out.finish_reason == "stop"
    assert not llm.engine.scheduler.has_work


def test_a_request_without_a_seed_gets_one_that_reproduces_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True)
    first, second = llm.generate([[5, 6, 7]] * 2, params)
    assert first.seed != second.seed
    again = llm.generate([[5, 6, 7]], SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, seed=first.seed))
    assert again[0].outputs[0].token_ids == first.outputs[0].token_ids


def test_abort_frees_pages_in_every_state(llm: LLM) -> None:
    engine_ = llm.engine
    before = engine_.pool.available
    for i in range(20):  # more than slots: running, extending and waiting
        engine_.add(request(f"r{i}", prompts(1, 250, low=40, high=90, seed=i)[0], max_tokens=50))
    for _ in range(5):
        engine_.step()
    for i in range(20):
        engine_.abort(f"r{i}")
    engine_.abort("r0")
    engine_.abort("never heard of")
    assert engine_.pool.available == before
    while engine_.has_work():
        assert engine_.step() == []
    engine_.check_integrity()
    assert engine_.scheduler.slots.available == 8


def test_abort_does_not_affect_other_requests(llm: LLM) -> None:
    batch = prompts(4, 250, seed=9)
    expected = tokens(llm, batch, GREEDY)
    for i, prompt in enumerate(batch):
        llm.engine.add(request(f"q{i}", prompt, max_tokens=20))
    for _ in range(6):
        for delta in llm.engine.step():
            if delta.request_id != "q1":
                expected[int(delta.request_id[1])] = expected[int(delta.request_id[1])][len(delta.token_ids) :]
    llm.engine.abort("q1")
    rest = run(llm)
    assert {i: rest[f"q{i}"] for i in (0, 2, 3)} == {i: expected[i] for i in (0, 2, 3)}


def test_bad_requests_are_refused_and_nothing_is_lost(llm: LLM) -> None:
    for prompt, words in (
        ([], "no tokens"),
        ([1] * 256, r"256 tokens; the context of 256 leaves room for 255"),
        ([1, 263], r"token id 263; the vocabulary's ids are 0 to 262"),
        ([-1], "token id -1"),
    ):
        with pytest.raises(BadRequest, match=words):
            llm.generate([[1, 2], prompt], GREEDY)
        assert not llm.engine.scheduler.has_work
    with pytest.raises(BadRequest, match="2 SamplingParams for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    llm.engine.add(request("same", [1, 2], max_tokens=4))
    with pytest.raises(BadRequest, match="running already"):
        llm.engine.add(request("same", [1, 2], max_tokens=4))
    assert len(run(llm)["same"]) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5),
     ("min_p", 2), ("seed", -2), ("seed", 2**63), ("max_tokens", 0), ("stop", ("",)), ("stop_token_ids", (-4,))],
)  # fmt: skip
def test_sampling_parameters_out_of_range(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_first_come_first_served(llm: LLM) -> None:
    for i in range(12):
        llm.engine.add(request(f"f{i}", [i + 1] * 30, max_tokens=6))
    order: list[str] = []
    while llm.engine.has_work():
        for delta in llm.engine.step():
            if delta.request_id not in order:
                order.append(delta.request_id)
    assert order == [f"f{i}" for i in range(12)]


def test_running_requests_are_not_starved_by_prompts(qwen3: Path) -> None:
    with engine(qwen3, max_num_batched_tokens=32, max_stall_ms=1) as llm:
        llm.engine.add(request("runs", [1, 2, 3], max_tokens=40))
        for i in range(7):
            llm.engine.add(request(f"long{i}", prompts(1, 250, low=240, high=250, seed=i)[0], max_tokens=2))
        gaps, since = [], 0
        while llm.engine.has_work():
            since += 1
            for delta in llm.engine.step():
                if delta.request_id == "runs":
                    gaps.append(since)
                    since = 0
                    if delta.finish is not FinishReason.RUNNING:
                        break
        assert max(gaps[1:]) == 2, "a pass of prompts, and a round"


def test_every_pass_is_counted_with_its_reason(qwen3: Path) -> None:
    with engine(qwen3, max_num_seqs=4) as llm:
        tokens(llm, [*prompts(6, 250, high=20), [7] * 100], GREEDY)
        passes = counted(llm)
        graph = "full" if CUDA else "tape"
        assert passes["round", graph, ""] > 19
        assert passes["extend", graph, ""] > 0
        assert CUDA or all(kind == graph for _, kind, _ in passes), "on a CPU every pass replays"
        assert sum(n for (program, _, _), n in passes.items() if program == "extend") <= 3
        rows = llm.engine.info()["graphs"]
        sizes = {r["rows"] for r in rows if r["program"] == "round"}
        assert {1, 4} <= sizes <= {1, 2, 4}, "on a GPU measured costs may leave 2 to the graph of 4"
        samples = {(n, tuple(sorted(labels.items()))): v for n, _, labels, v, _ in llm.engine.metrics()}
        key = ("passes", (("kind", graph), ("program", "round"), ("reason", "")))
        assert samples[key] == passes["round", graph, ""]
    with engine(qwen3, enforce_eager=True) as llm:
        tokens(llm, [[1, 2]], GREEDY)
        assert {reason for _, _, reason in counted(llm)} == {"DISABLED"}


def test_one_round_is_one_launch_behind_the_host(llm: LLM) -> None:
    """The pass that brings a request's last token is read after the next pass was launched."""
    llm.engine.add(request("late", [1, 2, 3], max_tokens=3))
    assert llm.engine.step() == []
    assert [d.token_ids for d in llm.engine.step()] != []
    run(llm)


def test_unresolvable_engine_flags_raise(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 9999 is above the model's context of 512"):
        LLM(str(qwen3), max_model_len=9999)
    with pytest.raises(ConfigError, match="--dtype 'int3'"):
        LLM(str(qwen3), dtype="int3")
    with pytest.raises(ConfigError, match=r"needs 16 KV pages, 9 fit"):
        LLM(str(qwen3), max_model_len=256, num_pages=10)
    if not CUDA:
        with pytest.raises(ConfigError, match="no NVIDIA GPU"):
            LLM(str(qwen3), device="cuda")


def test_explain_gives_every_automatic_choice_a_reason(llm: LLM) -> None:
    decisions = llm.engine.info()["decisions"]
    assert {"device", "dtype", "attention_backend", "num_pages"} <= {d["name"] for d in decisions}
    assert all(d["reason"] for d in decisions)


def test_dummy_weights_need_config_only(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    with LLM(str(tmp_path), load_format="dummy", max_num_seqs=2, max_model_len=64) as llm:
        assert len(tokens(llm, [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True, seed=1))[0]) == 4
        with pytest.raises(BadRequest, match="has no tokenizer"):
            llm.generate("text")
