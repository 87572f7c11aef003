"""Sleep that frees weights and KV cache: afterwards the same bytes from the same graphs, at the same addresses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.changed_weights import GREEDY, PROMPTS, other
from tests.engine.helpers import counted, engine, tokens
from unisono.engine.worker import sleeping
from unisono.engine.worker.regions import HostRegion, make_region
from unisono.engine.worker.sleeping import SleepingMemory, modules_of
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, CheckpointError, ConfigError, EngineRequest, SpeculativeConfig

CPU = torch.device("cpu")
EAGLE3 = SpeculativeConfig("eagle3", "tiny-eagle3", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def served() -> Any:
    with engine("tiny", speculative=EAGLE3, enable_sleep_mode=True) as llm:
        yield llm


@pytest.fixture
def llm(served: LLM) -> Any:
    """An engine with the weights of the start."""
    served.wake_up(["weights"], reload=False)
    served.update_weights(str(served.engine.checkpoint.path), version="old")
    served.wake_up()
    return served


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def addresses(llm: LLM) -> list[int]:
    """Where all weights and pages lie."""
    worker = llm.engine.worker
    modules = (*worker.modules(), *modules_of(worker.drafter))
    weights = [p.data_ptr() for module in modules for p in module.parameters()]
    return [*weights, *(pages.data_ptr() for pages in worker.store.page_memory())]


@pytest.mark.parametrize("level", [1, 2])
def test_same_bytes(llm: LLM, level: int) -> None:
    """With drafts; twice, as the second sleep reuses the host memory of the first one."""
    expected, graphs, where = tokens(llm, PROMPTS, GREEDY), list(llm.engine.runner.planner.graphs()), addresses(llm)
    for _ in range(2):
        before = counted(llm)
        freed = llm.sleep(level)["freed_bytes"]
        assert llm.is_sleeping
        assert freed["kv_cache"] >= llm.engine.worker.store.nbytes()
        assert (freed["weights"] > 0) == (level == 2), "a CPU's weights are in host memory already"
        assert llm.wake_up() == {
            "is_sleeping": False, "asleep": [], "weight_version": "old", "missing_weights": 0,
        }  # fmt: skip
        assert tokens(llm, PROMPTS, GREEDY) == expected
        assert set(graphs) <= set(llm.engine.runner.planner.graphs())
        assert addresses(llm) == where
        assert not any(kind == "eager" for _, kind, _ in counted(llm).keys() - before.keys())
    llm.engine.check_integrity()


def test_memory_occupation_is_sglangs_name_of_sleep(llm: LLM) -> None:
    expected = tokens(llm, PROMPTS, GREEDY)
    llm.release_memory_occupation()
    assert llm.engine.sleep.asleep == {"weights", "kv_cache"}
    llm.resume_memory_occupation(["weights"])
    llm.resume_memory_occupation(["kv_cache"])
    llm.release_memory_occupation(["kv_cache"])
    assert llm.engine.sleep.asleep == {"kv_cache"}
    llm.resume_memory_occupation()
    assert tokens(llm, PROMPTS, GREEDY) == expected
    with pytest.raises(ConfigError, match="name both"):
        llm.release_memory_occupation(["weights"])
    with pytest.raises(ConfigError, match="tag 'weight'"):
        llm.release_memory_occupation(["kv_cache", "weight"])


def test_the_process_returns_its_memory(llm: LLM) -> None:
    """Level 2 takes all of weights and pages out of the resident set, but for the drafter's, which move."""
    tokens(llm, PROMPTS, GREEDY)
    for pages in llm.engine.worker.store.page_memory():
        pages.zero_()  # a CPU commits pages at their first write
    drafter = sum(p.nbytes for module in modules_of(llm.engine.worker.drafter) for p in module.parameters())
    held, before = sum(llm.engine.worker.memory.nbytes.values()), resident()
    llm.sleep(2)
    returned = before - resident()
    assert returned > 0.95 * (held - drafter) - sleeping.HOST_BYTES * len(llm.engine.worker.memory._host)
    assert returned > 0.5 * held


def test_dropped_weights_are_pushed(llm: LLM, tmp_path: Path) -> None:
    """Awake weights alone serve nobody; pages wake once all tensors are there."""
    path = llm.engine.checkpoint.path
    new = load_file(next(other(path, tmp_path / "new").glob("*.safetensors")))
    names = sorted(new)
    llm.update_weights_from_tensor(new, version="new")
    expected = tokens(llm, PROMPTS, GREEDY)
    llm.sleep(2)
    with pytest.raises(ConfigError, match="weights sleep"):
        llm.update_weights_from_tensor(new)
    with pytest.raises(ConfigError, match="version new were pushed and are in no directory"):
        llm.wake_up()
    assert llm.wake_up(["weights"], reload=False)["missing_weights"] == len(names)
    llm.update_weights_from_tensor({name: new[name] for name in names[1:]})
    with pytest.raises(ConfigError, match=rf"1 dropped tensors, such as {names[0]}"):
        llm.wake_up(["kv_cache"])
    with pytest.raises(BadRequest, match=r"the engine sleeps \(kv_cache\)"):
        tokens(llm, PROMPTS, GREEDY)
    llm.update_weights_from_tensor({names[0]: new[names[0]]})
    assert not llm.wake_up(["kv_cache"])["is_sleeping"]
    assert tokens(llm, PROMPTS, GREEDY) == expected


def test_a_failed_push_after_level_2_keeps_the_engine_asleep(llm: LLM) -> None:
    expected = tokens(llm, PROMPTS, GREEDY)
    llm.sleep(2)
    llm.wake_up(["weights"], reload=False)
    with pytest.raises(CheckpointError, match="has no place"):
        llm.update_weights_from_tensor({"model.nowhere.weight": torch.ones(1)})
    assert llm.is_sleeping
    llm.wake_up()
    assert tokens(llm, PROMPTS, GREEDY) == expected


def test_a_failed_push_after_level_2_voids_its_tensors(llm: LLM) -> None:
    """It wrote over a tensor that an earlier push had brought, so that one is missing again."""
    new = load_file(next(llm.engine.checkpoint.path.glob("*.safetensors")))
    first, second, *others = sorted(new)
    expected = tokens(llm, PROMPTS, GREEDY)
    llm.sleep(2)
    llm.wake_up(["weights"], reload=False)
    llm.update_weights_from_tensor({name: new[name] for name in (second, *others)})
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        llm.update_weights_from_tensor({first: torch.full_like(new[first], torch.nan), second: new[second] + 1})
    with pytest.raises(ConfigError, match=rf"2 dropped tensors, such as {first}"):
        llm.wake_up(["kv_cache"])
    llm.update_weights_from_tensor({first: new[first], second: new[second]})
    assert not llm.wake_up(["kv_cache"])["is_sleeping"]
    assert tokens(llm, PROMPTS, GREEDY) == expected


def test_a_drafter_is_pushed_while_the_target_is_void(llm: LLM) -> None:
    """Its names fill nothing of the target, and a failed push leaves its old weights."""
    heads = load_file(next(Path(llm.engine.worker.updater.draft_directory).glob("*.safetensors")))
    del heads["d2t"], heads["t2d"]  # they are fixed
    modules = [p for module in modules_of(llm.engine.worker.drafter) for p in module.parameters()]
    llm.sleep(2)
    llm.wake_up(["weights"], reload=False)
    void = llm.engine.worker.updater.void
    void.add("fc.weight")  # as of a target with a tensor of this name
    missing = len(void)
    own = [p.clone() for p in modules]
    bad = {"norm.weight": torch.full_like(heads["norm.weight"], torch.nan), "fc.weight": heads["fc.weight"] + 1}
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        llm.update_weights_from_tensor(bad, draft=True)
    assert all(map(torch.equal, own, modules))
    llm.update_weights_from_tensor(heads, draft=True)
    assert len(void) == missing
    llm.wake_up()


def test_running_requests_wait_and_go_on(llm: LLM) -> None:
    expected = tokens(llm, PROMPTS, GREEDY)
    said: dict[str, list[int]] = {f"r{number}": [] for number in range(len(PROMPTS))}
    for name, prompt in zip(said, PROMPTS, strict=True):
        llm.engine.add(EngineRequest(name, list(prompt), GREEDY))

    def step() -> None:
        for delta in llm.engine.step():
            said[delta.request_id] += delta.token_ids

    for _ in range(3):
        step()
    assert llm.sleep(1)["recomputed_requests"] > 0
    said["late"] = []
    llm.engine.add(EngineRequest("late", list(PROMPTS[0]), GREEDY))
    for _ in range(3):
        step()
    assert not said["late"]
    llm.wake_up()
    while llm.engine.has_work():
        step()
    assert list(said.values()) == [*expected, expected[0]]


def test_refusals(llm: LLM, qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="level=3"):
        llm.sleep(3)
    with pytest.raises(ConfigError, match="tag 'graphs'"):
        llm.wake_up(["graphs"])
    llm.pause_generation()
    assert not llm.wake_up()["is_sleeping"]
    assert llm.engine.paused, "a wake without a sleep resumes nothing"
    llm.continue_generation()
    llm.sleep(1)
    with pytest.raises(ConfigError, match="sleeps already"):
        llm.sleep(1)
    llm.pause_generation()
    llm.wake_up()
    assert llm.engine.paused, "held while it slept"
    llm.continue_generation()
    with engine(qwen3) as plain, pytest.raises(ConfigError, match="--enable-sleep-mode"):
        plain.sleep()


def test_dummy_weights_come_back(qwen3: Path) -> None:
    with engine(qwen3, load_format="dummy", enable_sleep_mode=True) as llm:
        expected = tokens(llm, PROMPTS, GREEDY)
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm, PROMPTS, GREEDY) == expected


def test_saved_spans_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through buffers that are smaller than a weight; dropped weights read as zeros."""
    monkeypatch.setattr(sleeping, "HOST_BYTES", 64)
    module = torch.nn.Module()
    for name, size in (("a", 50), ("b", 3), ("c", 70)):
        module.register_parameter(name, torch.nn.Parameter(torch.randn(size), requires_grad=False))
    module.register_parameter("tied", torch.nn.Parameter(module.a[10:20], requires_grad=False))
    values = {name: parameter.clone() for name, parameter in module.named_parameters()}
    memory = SleepingMemory(CPU)
    memory.place([module])
    assert module.tied.data_ptr() == module.a.data_ptr() + 40
    memory.sleep(2, [module.b])
    assert not module.a.any()
    memory.wake_weights()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, torch.zeros(3) if name == "b" else values[name])


def test_host_regions_read_as_zeros_once_freed() -> None:
    region = make_region(1 << 16, CPU)
    assert isinstance(region, HostRegion)
    part = region.part(100, 50).fill_(7)
    region.free()
    assert not part.any()
    part.fill_(3)
    assert int(region.part(149, 1)) == 3
