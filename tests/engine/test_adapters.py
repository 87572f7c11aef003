"""Adapters in the engine: transformers' text of merged weights, the same bytes in any company, places and prefixes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.helpers import counted, engine, idle, lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import GRAPH
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.make_adapters import DELTA, LINEARS, make_adapter, merged
from unisono.entrypoints.llm import LLM
from unisono.graphs.recorder import RecordedOp
from unisono.types import BadRequest, CheckpointError, FinishReason, SamplingParams, SpeculativeConfig
from unisono.types.lora import LoRARequest

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = prompts(6, 250, low=3, high=50)
PARAMS = mixed_params(6, max_tokens=16)
BRIEF = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NAMES = (None, "one", "two", "three")
ON = {"enable_lora": True, "max_loras": 3}


@pytest.fixture(scope="module")
def adapters(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRARequest]:
    """Three adapters of the same base: of several ranks, and of some modules only."""
    root = tmp_path_factory.mktemp("adapters")
    kinds = {"one": {}, "two": {"rank": 16, "targets": LINEARS[:4]}, "three": {"rank": 3, "targets": ("down_proj",)}}
    return {
        name: LoRARequest(name, number, str(make_adapter(root / name, qwen3, number, size=1.0, **kind)))
        for number, (name, kind) in enumerate(kinds.items(), 1)
    }


def mixed(adapters: dict[str, LoRARequest]) -> list[LoRARequest | None]:
    """An adapter or none for each of PROMPTS."""
    return [adapters.get(NAMES[i % len(NAMES)] or "") for i in range(len(PROMPTS))]


def run(llm: LLM, batch: list, params: object, lora: object) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(batch, params, lora_request=lora)]


@pytest.fixture(scope="module")
def alone(qwen3: Path, adapters: dict[str, LoRARequest]) -> list[list[int]]:
    """Each request by itself, eager; those without an adapter in an engine that knows none."""
    with (
        engine(qwen3, max_num_seqs=1, enforce_eager=True, **ON) as llm,
        engine(qwen3, max_num_seqs=1, enforce_eager=True) as plain,
    ):
        each = zip(PROMPTS, PARAMS, mixed(adapters), strict=True)
        return [run(llm if lora else plain, [p], [q], lora)[0] for p, q, lora in each]


# ---- parity -----------------------------------------------------------------------------------------

CASES = {
    "llama": ("llama", {}, {"rank": 8, "alpha": 12.0}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, {"change": {"use_rslora": True}}),
    "patterns": ("qwen3", {}, {"ranks": {"o_proj": 2}, "change": {"alpha_pattern": {"down_proj": 3.0}}}),
    "qwen3_5": ("qwen3_5_text", {}, {"targets": (*LINEARS, *DELTA)}),
    "qwen3_next": ("qwen3_next", {}, {"targets": (*LINEARS[:4], "in_proj_qkvz", "in_proj_ba", "out_proj")}),
}


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen3", "qwen3_5", *(pytest.param(c, marks=pytest.mark.full) for c in ("patterns", "qwen3_next"))],
)
def test_text_and_logits_are_those_of_merged_weights(case: str, tmp_path: Path) -> None:
    family, overrides, kind = CASES[case]
    base = make_checkpoint(tmp_path / "base", family, tokenizer=False, **overrides)
    adapter = make_adapter(tmp_path / "adapter", base, 1, **kind)
    model = reference(merged(base, adapter, tmp_path / "merged"))
    model.generation_config.eos_token_id = None
    prompt, params = PROMPTS[0], replace(GREEDY, return_hidden_states=True)
    with torch.inference_mode(), lazy_engine(base, dtype="float32", max_num_seqs=2, **ON) as llm:
        asked = LoRARequest("it", 1, str(adapter))
        out, plain = llm.generate([prompt, prompt], params, lora_request=[asked, None])
        ids = out.outputs[0].token_ids
        theirs = model(torch.tensor([prompt + ids])).logits[0, :-1]
        hidden = torch.cat((out.prompt_hidden_states, out.outputs[0].hidden_states))
        ours = llm.engine.worker.model.logits(hidden[: len(theirs)])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert theirs[len(prompt) - 1 :].argmax(-1).tolist() == ids
        assert plain.outputs[0].token_ids != ids, "the adapter changes nothing"


# ---- same bytes -------------------------------------------------------------------------------------

EARLY = {"adapter_shrink": (0, 1, 2, 3), "adapter_expand": (2, 4, 5), "adapter_silu": (2, 3, 4)}
"""Arguments that the op's kernel reads before its turn (``READ_EARLY``), while the launch before it may still run."""


QUANTISING = {"rms_norm_fp8", "add_rms_norm_fp8", "silu_mul_fp8", "quantize_fp8"}

LEADING = QUANTISING | {"rope_and_cache", "attention", "attention_fp8"}
"""Ops whose kernels allow the next launch to begin before their turn (``LEADING``), while the one ahead still runs."""


def still_running(launches: Sequence[RecordedOp]) -> set[int]:
    """The storages that the last of these launches write, those that may still run when the next one begins."""
    found: set[int] = set()
    for step in reversed(launches):
        found |= written(step)
        if str(step.op).split(".")[1] not in LEADING:
            break
    return found


def written(step: RecordedOp) -> set[int]:
    """The storages that an op of a tape writes."""
    changed = [
        given
        for given, declared in zip(step.args, step.op._schema.arguments, strict=False)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]
    return {tensor.untyped_storage().data_ptr() for tensor in (*step.results, *changed)}


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_overlapped_launches_do_not_read_their_predecessors_output(
    quantization: str | None, qwen3: Path, adapters: dict[str, LoRARequest]
) -> None:
    flags = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "quantization": quantization}
    seen = set()
    with engine(qwen3, **ON, **flags) as llm:
        run(llm, [(PROMPTS[0] * 20)[:200]], BRIEF, [adapters["one"]])
        for graph in llm.engine.runner.planner.graphs():
            launches = [step for step in graph.parts if isinstance(step, RecordedOp) and not step.view]
            for at, step in enumerate(launches):
                name = str(step.op).split(".")[1]
                early = {step.args[place].untyped_storage().data_ptr() for place in EARLY.get(name, ())}
                assert not early & still_running(launches[:at]), f"{name} after {launches[at - 1].op} in {graph.key}"
                seen.add(name)
    assert seen >= set(EARLY)
    assert bool(seen & QUANTISING) == (quantization == "fp8")
    assert seen & LEADING > seen & QUANTISING


WAYS = {
    "mixed": {},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    "one place": {"max_loras": 1, "max_cpu_loras": 2},
    "drafts": {"speculative": SpeculativeConfig("ngram", num_speculative_tokens=3), "max_lora_rank": 100},
}
MORE_WAYS = {
    "eager": {"enforce_eager": True},
    "segmented": {"graphs": "segmented"},
    "compiled": {"compile": True, "max_num_seqs": 4},
    "few pages": {"max_model_len": 96, "num_pages": 1 + 12},
    "tree": {"speculative": SpeculativeConfig.parse({"method": "ngram", "topk": 2, "num_draft_tokens": 6})},
}


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.full) for way in MORE_WAYS)])
def test_same_bytes(way: str, qwen3: Path, adapters: dict[str, LoRARequest], alone: list[list[int]]) -> None:
    with lazy_engine(qwen3, **{**ON, **(WAYS | MORE_WAYS)[way]}) as llm:
        if way not in ("one place", "chunks of 16"):
            assert run(llm, PROMPTS, PARAMS, mixed(adapters)) == alone
            idle(llm)
            llm.engine.runner.planner.reset_counts()
        assert run(llm, PROMPTS, PARAMS, mixed(adapters)) == alone, "after prefix hits and captures"
        idle(llm)
        llm.engine.check_integrity()
        rounds = {kind for program, kind, _ in counted(llm) if program == "round"}
        kind = {
            "eager": "eager",
            "compiled": f"{GRAPH}-compiled" if GRAPH == "tape" else "compiled",
            "segmented": f"{GRAPH}-segmented" if GRAPH == "tape" else "segmented",
        }
        assert rounds == {kind.get(way, GRAPH)}


def test_requests_without_adapters_replay_the_graphs_of_an_engine_without(qwen3: Path, alone: list) -> None:
    with engine(qwen3) as plain, engine(qwen3, **ON) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == tokens(plain, PROMPTS, PARAMS)
        assert counted(llm) == counted(plain)
        keys = {graph.key for graph in plain.engine.runner.planner.graphs()}
        assert keys <= {graph.key for graph in llm.engine.runner.planner.graphs()}


@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.full)])
def test_draft_heads_of_the_base_change_no_byte(
    method: str, checkpoints_of: Callable[[str], tuple[Path, Path | None]], tmp_path: Path
) -> None:
    """They see the target's hidden states, adapters included; each adapter's accept length is told."""
    target, head = checkpoints_of(method)
    asked = [LoRARequest(name, n, str(make_adapter(tmp_path / name, target, n))) for n, name in ((1, "a"), (2, "b"))]
    lora, batch = [None, *asked], PROMPTS[:3]
    params = [PARAMS[1], replace(GREEDY, max_tokens=20), PARAMS[2]]
    with engine(target, **ON) as llm:
        expected = run(llm, batch, params, lora)
    spec = SpeculativeConfig(method, str(head) if head else None, num_speculative_tokens=3)
    with engine(target, speculative=spec, **ON) as llm:
        assert run(llm, batch, params, lora) == expected
        told = {one["name"]: one for one in llm.engine.info()["adapters"]}
        assert told["a"]["generation_tokens"] == len(expected[1])
        counted = {(m.name, m.labels.get("adapter")): m.value for m in llm.get_metrics()}
        for name in ("a", "b"):
            assert 1 <= told[name]["avg_spec_accept_length"] <= 4
            drafted, accepted = (counted[f"vllm:adapter_{kind}_tokens", name] for kind in ("draft", "accepted"))
            assert drafted > accepted >= 0


@pytest.mark.parametrize("quantization", ["fp8"])
def test_over_quantised_weights(quantization: str, tmp_path: Path) -> None:
    """Adapters read what was not quantised; rows without one have the bits of an engine without adapters."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, head_dim=64, **sizes)
    asked = LoRARequest("it", 1, str(make_adapter(tmp_path / "it", base, 1, size=1.0)))
    with engine(base, quantization=quantization) as llm:
        plain = tokens(llm, PROMPTS[:2], BRIEF)
    with engine(base, quantization=quantization, **ON) as llm:
        both = run(llm, PROMPTS[:2], BRIEF, [None, asked])
        assert both[0] == plain[0]
        assert both[1] != plain[1]
        assert run(llm, PROMPTS[1:2], BRIEF, asked) == both[1:]


# ---- prefixes, places, names ------------------------------------------------------------------------


def test_equal_prompts_of_different_adapters_share_no_page(
    qwen3: Path, adapters: dict[str, LoRARequest], tmp_path: Path
) -> None:
    prompt, short = [list(range(3, 83))], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(llm: LLM, lora: LoRARequest | None, prompt: Any = prompt) -> int:
        return llm.generate(prompt, short, lora_request=lora)[0].num_cached_tokens

    elsewhere = LoRARequest("copy", 9, str(shutil.copytree(adapters["one"].lora_path, tmp_path / "copy")))
    salted = {"prompt_token_ids": prompt[0], "cache_salt": "mine"}
    with engine(qwen3, **ON, max_cpu_loras=4) as llm:
        for lora in (None, adapters["one"], adapters["two"], elsewhere):
            assert cached(llm, lora) == 0, "nobody else's"
            assert cached(llm, lora) == 64, "its own"
            assert cached(llm, lora, salted) == 0, "another salt's"
            assert cached(llm, lora, salted) == 64


def test_base_requests_overtake_requests_that_wait_for_an_adapter_slot(
    qwen3: Path, adapters: dict[str, LoRARequest]
) -> None:
    long, short = replace(GREEDY, max_tokens=40), replace(GREEDY, max_tokens=3)
    with engine(qwen3, enable_lora=True, max_loras=1, max_cpu_loras=3) as llm:
        order: list[str] = []
        kinds = [("one", long), ("two", short), ("one again", short), ("none", short)]
        for name, params in kinds:
            request = llm.prepare(PROMPTS[0], params, name, lora_request=adapters.get(name.split()[0])).requests[0]
            llm.engine.add(replace(request, request_id=name))
        places = next(f for f in llm.engine.runner.request_features if f.name == "adapters").places
        while llm.engine.has_work():
            order += [d.request_id for d in llm.engine.step() if d.finish is not FinishReason.RUNNING]
            assert sum(place.users for place in places.all) <= 2
        assert order == ["none", "one", "two", "one again"], "adapters are served in the order in which they are asked"
        assert places.writes == 3
        assert not any(place.users for place in places.all)


def test_invalid_lora_requests_raise(qwen3: Path, adapters: dict[str, LoRARequest], tmp_path: Path) -> None:
    one = adapters["one"]
    with engine(qwen3, **ON) as llm:
        run(llm, [PROMPTS[0]], BRIEF, one)
        for wrong, says in [
            (replace(one, lora_path="/elsewhere"), "give another one another name"),
            (replace(one, lora_name="two"), "is the adapter 'one' already"),
            (LoRARequest("x", 7, str(tmp_path / "none")), "is no directory"),
            ([one, one], "2 lora_requests for 1 prompts"),
        ]:
            with pytest.raises(BadRequest, match=says):
                run(llm, [PROMPTS[0]], GREEDY, wrong)
    with engine(qwen3) as llm, pytest.raises(BadRequest, match="enable_lora=True"):
        run(llm, [PROMPTS[0]], GREEDY, one)
    for wrong in ({"lora_int_id": 0}, {"lora_name": ""}, {"lora_path": ""}):
        with pytest.raises(BadRequest):
            replace(one, **wrong)
    modules = {"enable_lora": True, "lora_modules": ["a=/nowhere"]}
    with pytest.raises(CheckpointError, match="/nowhere: it does not exist"):
        engine(qwen3, **modules)


def test_a_dropped_adapter_is_read_again_unless_it_has_changed(qwen3: Path, tmp_path: Path) -> None:
    a, b = (LoRARequest(name, n, str(make_adapter(tmp_path / name, qwen3, n))) for n, name in ((1, "a"), (2, "b")))
    with engine(qwen3, enable_lora=True, max_loras=1) as llm:
        expected = run(llm, [PROMPTS[0]], BRIEF, a)
        run(llm, [PROMPTS[0]], BRIEF, b)  # one place, and memory for one
        assert run(llm, [PROMPTS[0]], BRIEF, a) == expected
        run(llm, [PROMPTS[0]], BRIEF, b)
        make_adapter(tmp_path / "a", qwen3, 5)
        with pytest.raises(BadRequest, match="has changed since 'a' was loaded; load it again"):
            run(llm, [PROMPTS[0]], BRIEF, a)


def test_a_request_is_checked_while_no_step_runs(
    qwen3: Path, adapters: dict[str, LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking may read an adapter again, which other ranks have to do, too: nothing else may be sent meanwhile."""
    with engine(qwen3, **ON) as llm:
        feature, led = next(f for f in llm.engine.runner.request_features if f.name == "adapters"), []
        begin = feature.begin
        monkeypatch.setattr(feature, "begin", lambda request: (led.append(llm.loop._owned.locked()), begin(request))[1])
        run(llm, [PROMPTS[0]], BRIEF, adapters["one"])
        assert led == [True, True], "checked, then added"


def test_adapters_of_finished_requests_are_evicted(qwen3: Path, adapters: dict[str, LoRARequest]) -> None:
    """Beyond --max-cpu-loras adapters stay in memory for requests that are open, and no longer."""
    with engine(qwen3, enable_lora=True, max_loras=2) as llm:
        held = next(f for f in llm.engine.runner.request_features if f.name == "adapters").held
        run(llm, PROMPTS[:4], BRIEF, adapters["one"])
        for name in ("two", "three", "three"):
            run(llm, [PROMPTS[0]], BRIEF, adapters[name])
        assert len(held.digests) == 2


def test_pushed_adapters_are_those_of_directories(qwen3: Path, adapters: dict[str, LoRARequest]) -> None:
    """Tensors in place of an adapter of that name: as a directory of them, with graphs and without old prefixes."""
    stored = {
        name: (
            load_file(Path(one.lora_path, "adapter_model.safetensors")),
            json.loads(Path(one.lora_path, "adapter_config.json").read_text()),
        )
        for name, one in adapters.items()
    }
    batch = [[*range(5, 45)]] * 2
    with engine(qwen3, **ON) as llm:
        wanted = {name: run(llm, batch, BRIEF, one) for name, one in adapters.items()}
    with engine(qwen3, **ON) as llm:
        pushed = llm.load_lora_adapter_from_tensors("policy", *stored["one"])
        assert run(llm, batch, BRIEF, pushed) == wanted["one"]
        idle(llm)
        graphs = set(llm.engine.runner.planner.graphs())
        for name in ("two", "three", "one"):
            again = llm.load_lora_adapter_from_tensors("policy", *stored[name])
            assert again.lora_int_id == pushed.lora_int_id
            assert run(llm, batch, BRIEF, again) == wanted[name]
        broken = {name: tensor[:, :-1] for name, tensor in stored["two"][0].items()}
        with pytest.raises(BadRequest, match="tensors: "):
            llm.load_lora_adapter_from_tensors("policy", broken, stored["two"][1])
        assert run(llm, batch, BRIEF, again) == wanted["one"]
        assert graphs <= set(llm.engine.runner.planner.graphs())
        directory = Path(again.lora_path)
        assert directory.is_dir()
    assert not directory.exists()
