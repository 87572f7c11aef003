"""KV offload: pages wait in host memory and come back, and no byte of any text depends on it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.bundled import SETUPS
from tests.engine.changed_weights import other
from tests.engine.helpers import counted, engine, mixed_params, prompts, tokens
from tests.engine.host_files import HOST, run_with_files
from tests.engine.late_pages import LatePages, arrive_late
from unisono.config import catalog
from unisono.engine import offload
from unisono.entrypoints.llm import LLM
from unisono.kv.offload.host_pages import HostPages
from unisono.kv.offload.part_files import MAGIC
from unisono.kv.prefix_tree import page_digest, page_keys
from unisono.kv.specs import PAGE_SIZE
from unisono.types import ConfigError, EngineRequest, SamplingParams


def shared_prompts(count: int, documents: int = 8, seed: int = 5) -> list[list[int]]:
    """Prompts that begin with one of a few documents, whose pages do not fit the device together."""
    rng = random.Random(seed)
    texts = prompts(documents, 250, low=64, high=140, seed=seed)
    return [rng.choice(texts) + tail for tail in prompts(count, 250, low=2, high=40, seed=seed + 1)]


def offloaded(llm: LLM) -> Any:
    """The counters of an engine's offload."""
    assert llm.engine.pool.offload is not None
    return llm.engine.pool.offload.counters


FAST = ("tiny, eagle3", "tiny-hybrid, mtp")
CELLS = [
    *(pytest.param(name, 12, marks=() if name in FAST else pytest.mark.full) for name in SETUPS),
    *(pytest.param(name, 200, marks=pytest.mark.full) for name in SETUPS),
]


@pytest.mark.parametrize(("setup", "count"), CELLS)
def test_same_bytes(setup: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = SETUPS[setup]
    batch, params = shared_prompts(count), mixed_params(count, max_tokens=4 if count < 100 else 10)
    with engine(model, enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    arrive_late(monkeypatch)
    with engine(model, speculative=spec, **HOST) as llm:
        answers = tokens(llm, batch, params)
        again = tokens(llm, batch, params)
        found = offloaded(llm)
        llm.engine.check_integrity()
        passes = counted(llm)
    differ = sum(a != b for a, b in zip(expected * 2, answers + again, strict=True))
    assert differ == 0, f"{differ} of {2 * count} answers differ"
    assert found.parts_out > 44
    assert found.requests > count // 4
    assert found.hits > 16 * count
    assert all(kind != "eager" for program, kind, _ in passes if program == "round"), "a graph is never disabled for it"


@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny-hybrid", marks=pytest.mark.full)])
def test_prompts_that_end_around_a_page(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same document, cut one token before a page's end, there, and one after."""
    document, others = prompts(1, 250, low=200, high=201, seed=9)[0], prompts(6, 250, low=180, high=200, seed=3)
    cut = [document[: PAGE_SIZE * pages + off] for pages in (1, 9) for off in (-1, 0, 1)]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=6, ignore_eos=True)
    with engine(model, enable_prefix_caching=False, enforce_eager=True) as llm:
        expected = tokens(llm, cut, params)
    arrive_late(monkeypatch)
    with engine(model, max_num_seqs=2, **HOST) as llm:
        tokens(llm, [document], params)
        for prompt, answer in zip(cut, expected, strict=True):
            tokens(llm, others, params)  # what the document left on the device gives way
            before = offloaded(llm).hits
            (output,) = llm.generate([prompt], params)
            assert output.outputs[0].token_ids == answer
            if model == "tiny":
                assert output.num_cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
                assert offloaded(llm).hits - before == output.num_cached_tokens
        assert offloaded(llm).hits > 0
        llm.engine.check_integrity()


def test_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that gave their pages back find them in host memory."""
    batch, params = prompts(8, 250, low=40, high=70), mixed_params(8, max_tokens=40)
    with engine("tiny", enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    arrive_late(monkeypatch)
    with engine("tiny", max_model_len=144, num_pages=1 + 16, cpu_offload_ratio=8, enforce_eager=True) as llm:
        assert tokens(llm, batch, params) == expected
        assert llm.engine.scheduler.preemptions >= 1
        assert offloaded(llm).hits > 0
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


def evicted(llm: LLM, prompt: list[int], params: SamplingParams) -> None:
    """Have a prompt's pages in host memory only."""
    tokens(llm, [prompt], params)
    tokens(llm, prompts(5, 250, low=180, high=200, seed=3), params)
    assert not llm.engine.pool.tree.match(prompt)


def test_requests_run_while_offloaded_pages_load(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive_late(monkeypatch, polls=40)
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    short = SamplingParams(temperature=0, seed=1, max_tokens=4, ignore_eos=True)
    with engine("tiny", **HOST) as llm:
        evicted(llm, prompt, short)
        long = SamplingParams(temperature=0, seed=1, max_tokens=60, ignore_eos=True)
        llm.engine.add(EngineRequest("running", [5, 6, 7], long))
        while not llm.engine.scheduler.running:
            llm.engine.step()
        llm.engine.add(EngineRequest("coming", prompt, short))
        llm.engine.add(EngineRequest("later", [9, 8, 7], short))
        came: list[str] = []
        while len(came) < 40 and "coming" not in came:
            came += [delta.request_id for delta in llm.engine.step()]
        assert came.index("coming") > 20, "rounds did not wait"
        assert "later" in came, "later prompts did not wait"
        assert llm.engine.pool.offload is not None
        assert llm.engine.pool.offload.arrived


def test_an_aborted_request_leaves_its_pages_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy still writes to them: nobody may get them before it has ended."""
    arrive_late(monkeypatch, polls=10_000)
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    with engine("tiny", enforce_eager=True) as llm:
        expected = tokens(llm, [prompt], params)
    with engine("tiny", **HOST) as llm:
        evicted(llm, prompt, params)
        llm.engine.add(EngineRequest("gone", prompt, params))
        llm.engine.step()
        (transfer,) = llm.engine.pool.offload.transfers  # type: ignore[union-attr]
        pages = {node.page for node in transfer.nodes}
        assert len(pages) == 149 // PAGE_SIZE
        llm.engine.abort("gone")
        llm.engine.check_integrity()
        assert all(node.locks == 1 for node in transfer.nodes)
        others = prompts(4, 250, low=180, high=200, seed=6)
        tokens(llm, others, params)
        assert {node.page for node in llm.engine.pool.tree.nodes()} >= pages, "they were not taken by others"
        host: Any = llm.engine.worker.host_pages
        assert isinstance(host, LatePages)
        host.waiting[0][1] = 1
        assert tokens(llm, [prompt], params) == expected
        assert not llm.engine.pool.offload.transfers  # type: ignore[union-attr]
        llm.engine.check_integrity()


class SlowlyPolled(HostPages):
    """Pages that have arrived long before the host learns of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.polls = 40

    def poll(self) -> int:
        self.polls -= 1
        return self._last if self.polls < 0 else 0


@pytest.mark.parametrize("change", ["sleep", "weights"])
def test_a_change_of_memory_or_weights_waits_for_pages(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages on their way from host memory are not in the prefix tree afterwards."""
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    params = SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)
    new = other(catalog.bundled_path("tiny"), tmp_path / "new")
    with engine("tiny" if change == "sleep" else new, enforce_eager=True) as llm:
        expected = tokens(llm, [prompt], params)
    monkeypatch.setattr(offload, "make_host_pages", SlowlyPolled)
    with engine("tiny", **HOST, enforce_eager=True, enable_sleep_mode=True) as llm:
        evicted(llm, prompt, params)
        llm.engine.add(EngineRequest("coming", prompt, params))
        llm.engine.step()
        assert llm.engine.pool.offload is not None
        assert llm.engine.pool.offload.transfers
        if change == "sleep":
            llm.sleep(1)
            llm.wake_up()
        else:
            llm.update_weights(str(new))
        answer: list[int] = []
        while llm.engine.has_work():
            answer += (token for delta in llm.engine.step() for token in delta.token_ids)
        assert [answer] == expected
        llm.engine.check_integrity()


def test_aborts_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that stay have the bytes that they have alone, while others are aborted."""
    arrive_late(monkeypatch, polls=4)
    rng, batch, params = random.Random(3), shared_prompts(20), mixed_params(20, max_tokens=3)
    with engine("tiny-hybrid", enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    with engine("tiny-hybrid", **HOST, enforce_eager=True) as llm:
        answers: dict[str, list[int]] = {}
        todo, leaving = list(range(20)), {i for i in range(20) if rng.random() < 0.4}
        while todo or llm.engine.has_work():
            if todo and rng.random() < 0.5:
                i = todo.pop(0)
                llm.engine.add(EngineRequest(str(i), batch[i], params[i]))
            for delta in llm.engine.step():
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
            for i in [i for i in leaving if i not in todo and rng.random() < 0.3]:
                llm.engine.abort(str(i))
                leaving.discard(i)
                answers[str(i)] = expected[i]
        assert [answers[str(i)] for i in range(20)] == expected
        assert offloaded(llm).requests >= 3
        llm.engine.check_integrity()


def test_reset_forgets_host_memory_too() -> None:
    params = SamplingParams(temperature=0, seed=1, max_tokens=4, ignore_eos=True)
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    with engine("tiny", **HOST) as llm:
        evicted(llm, prompt, params)
        llm.engine.reset_prefix_cache()
        (output,) = llm.generate([prompt], params)
        assert output.num_cached_tokens == 0
        assert not offloaded(llm).hits


def test_metrics() -> None:
    params = SamplingParams(temperature=0, seed=1, max_tokens=4, ignore_eos=True)
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    with engine("tiny", **HOST) as llm:
        evicted(llm, prompt, params)
        tokens(llm, [prompt], params)
        told = {(name, *labels.values()): value for name, _, labels, value, _ in llm.engine.metrics()}
    assert told["kv_offload_hits",] == 144
    assert told["kv_offload_requests",] == 1
    assert told["kv_offload_moved_parts", "in"] == 9
    assert told["kv_offload_moved_parts", "out"] > 9
    assert told["kv_offload_bytes", "pages"] == told["kv_offload_parts", "pages"] * 128 * 1024
    with engine("tiny", enforce_eager=True) as llm:
        assert not [name for name, *_ in llm.engine.metrics() if "offload" in name]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"cpu_offload_gb": -1.0}, "--cpu-offload-gb -1.0"),
        ({"cpu_offload_ratio": float("nan")}, "--cpu-offload-ratio nan"),
        ({"cpu_offload_gb": 1.0, "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"cpu_offload_gb": 1e-9}, "give at least"),
        ({"kv_offload_dir": "x"}, "give --cpu-offload-gb"),
        ({"kv_offload_dir": "/proc/nowhere", "cpu_offload_ratio": 2.0}, "--kv-offload-dir /proc/nowhere"),
    ],
)
def test_invalid_offload_flags_raise(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine("tiny", **flags)


# ---- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny-hybrid", marks=pytest.mark.full)])
def test_files_outlive_the_engine(model: str, tmp_path: Path) -> None:
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    first, figures = run_with_files(tmp_path, prompt, model)
    assert figures["files_read"] == 0
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*.kv"))) >= 9
    assert not [path for path in folder.iterdir() if path.suffix != ".kv"]
    second, figures = run_with_files(tmp_path, prompt, model)
    assert second == first
    assert figures["files_read"] >= 9
    assert figures["cached"] >= 128
    assert figures["files_bad"] == 0


def test_bad_files_are_removed(tmp_path: Path) -> None:
    """One cut off, one changed, one of another engine under this one's name, one that a writer did not finish."""
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    first, _ = run_with_files(tmp_path, prompt)
    (folder,) = tmp_path.iterdir()
    digests, digest = [], b""
    for key in page_keys(prompt):
        digest = page_digest(digest, tuple(key))
        digests.append(folder / f"0-{digest.hex()}.kv")
    cut, changed, foreign = digests[2], digests[3], digests[4]
    cut.write_bytes(cut.read_bytes()[:-7])
    data = bytearray(changed.read_bytes())
    data[500] ^= 1
    changed.write_bytes(bytes(data))
    data = bytearray(foreign.read_bytes())
    data[len(MAGIC)] ^= 1
    foreign.write_bytes(bytes(data))
    (folder / "0-00.999").write_bytes(b"half")
    second, figures = run_with_files(tmp_path, prompt)
    assert second == first
    assert figures["files_bad"] == 3
    assert figures["cached"] == 2 * PAGE_SIZE
    assert not (folder / "0-00.999").exists()


def test_other_engines_files_are_left_alone(tmp_path: Path) -> None:
    """Other weights, another drafter: another folder."""
    prompt = prompts(1, 250, low=100, high=101, seed=9)[0]
    for flags in ({}, {"load_format": "dummy"}, {"load_format": "dummy", "seed": 1}):
        _, figures = run_with_files(tmp_path, prompt, **flags)
        assert figures["files_read"] == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_files_keep_to_their_budget(tmp_path: Path) -> None:
    prompt = prompts(1, 250, low=150, high=151, seed=9)[0]
    budget = 10.5 * (128 * 1024 + 100) / (1 << 30)
    _, figures = run_with_files(tmp_path, prompt, kv_offload_dir_gb=budget)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) <= 10
    assert figures["file_bytes"] <= budget * (1 << 30)
