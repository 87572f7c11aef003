"""Adapters on several ranks: the bytes of one process, loaded at the start and between requests, and refused alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.adapters_ import made, spoiled
from tests.distributed.cells import CELLS, COUNT, UNTRAINED
from tests.distributed.requests_ import MANY, ROOMY, differing, run, spec
from tests.engine.conftest import checkpoints, checkpoints_of  # noqa: F401
from tests.engine.helpers import draw_drafts, engine, mixed_params, prompts
from tests.models.make import make_checkpoint
from tests.models.make_adapters import DELTA, LINEARS
from unisono.config import catalog
from unisono.entrypoints.llm import LLM
from unisono.types import CheckpointError, FinishReason
from unisono.types.lora import LoRARequest

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = prompts(6, 250, low=3, high=40)
PARAMS = [replace(params, logprobs=2) for params in mixed_params(6, max_tokens=10)]


def asked(llm: LLM, names: list[str | None]) -> list[Any]:
    """What requests get that name these adapters, all at once: tokens, and log-probabilities as text."""
    got: list[list[Any]] = [[] for _ in names]
    for number, name in enumerate(names):
        request = llm.prepare(PROMPTS[number], PARAMS[number], str(number)).requests[0]
        llm.engine.add(replace(request, request_id=str(number), adapter=name))
    while llm.engine.has_work():
        for delta in llm.engine.step():
            got[int(delta.request_id)].append((list(delta.token_ids), str(delta.logprobs)))
            assert delta.finish is not FinishReason.ABORT
    llm.engine.check_integrity()
    return got


def refused(llm: LLM, name: str, path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        llm.engine.command("load_adapter", {"name": name, "directory": str(path)})
    return str(error.value)


def through_an_engine(base: Path, ranks: int, good: dict[str, Path], bad: dict[str, Path], **flags: Any) -> list[Any]:
    """Adapters at the start and between requests, two places for three of them, room in memory for two."""
    flags = {**ROOMY, "max_loras": 2, "lora_modules": [f"one={good['one']}"], **flags}
    with engine(base, tensor_parallel_size=ranks, enable_lora=True, **flags) as llm:
        call, found = llm.engine.command, [asked(llm, ["one", None, "one"])]
        for name in ("two", "three"):
            found.append(call("load_adapter", {"name": name, "directory": str(good[name])}))
        found.append(asked(llm, [None, "one", "two", "three", "one", "two"]))
        held = next(feature for feature in llm.engine.runner.request_features if feature.name == "adapters").held
        before = set(held.digests)
        found += [refused(llm, "bad", path) for path in bad.values()]
        assert held.digests <= before, "nothing of what was refused is kept"
        found.append(call("unload_adapter", {"name": "two"}))
        found.append(call("load_adapter", {"name": "one", "directory": str(good["two"]), "again": True}))
        found.append(asked(llm, ["three", "one", None, "one", "three"]))
        found.append(asked(llm, ["three"]))
        found += [len(held.digests), call("adapters", {})]
        return found


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the next engine draw its numbers of drafts, the same for every engine."""
    return lambda: draw_drafts(monkeypatch)


def compare(drawn: Callable[[], None], base: Path, ranks: int, folder: Path, **flags: Any) -> None:
    given = made(folder / "good", base), spoiled(folder / "bad", base)
    drawn()
    alone = through_an_engine(base, 1, *given, **flags)
    drawn()
    assert through_an_engine(base, ranks, *given, **flags) == alone
    *_, replaced, _, held, listed = alone
    assert replaced[1] != alone[3][1], "the adapter that was put in its place"
    assert [one["name"] for one in listed] == ["one", "three"]
    assert held == 2, "no more than --max-cpu-loras in memory"


def test_two_ranks_with_an_eagle3_head(
    drawn: Callable[[], None],
    checkpoints_of: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    target, draft = checkpoints_of("eagle3")
    given = spec("eagle3", model=str(draft), num_speculative_tokens=2)
    compare(drawn, target, 2, tmp_path, speculative=given, adaptive=True)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_more_ranks(ranks: int, method: str, drawn: Callable[[], None], tmp_path: Path) -> None:
    """Four ranks over two KV heads."""
    base = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, **SIZES)
    given = spec("none") if method == "none" else spec(method, num_speculative_tokens=3)
    compare(drawn, base, ranks, tmp_path, speculative=given, adaptive=method != "none")


@pytest.mark.full
def test_over_fp8_weights(drawn: Callable[[], None], tmp_path: Path) -> None:
    """Blocks of 128 outputs are divided between two ranks."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, head_dim=128, **sizes)
    compare(drawn, base, 2, tmp_path, quantization="fp8")


@pytest.mark.full
def test_a_start_with_an_adapter_that_one_rank_cannot_read(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, **SIZES)
    bad = spoiled(tmp_path, base)
    for name, says in (("last", "has weights that are NaN"), ("none", "is no directory")):
        with pytest.raises(CheckpointError, match=says):
            engine(base, tensor_parallel_size=2, enable_lora=True, lora_modules=[f"it={bad[name]}"], **ROOMY)


# ---- 200 requests -----------------------------------------------------------------------------------

ADAPTED = ("tiny", "tiny, eagle3", "tiny, ngram", "tiny, mtp", "tiny, eagle3 tree", "tiny-hybrid", "tiny-hybrid, mtp")


@pytest.mark.full
@pytest.mark.parametrize("setup", ADAPTED)
def test_200_requests_with_adapters(setup: str, drawn: Callable[[], None], tmp_path: Path) -> None:
    """Three adapters and none in turn, two places; two and four ranks against the same run of one process."""
    target, given = CELLS[setup](tmp_path)
    base = catalog.bundled_path(target)
    paths = made(tmp_path / "adapters", base, (*LINEARS, *DELTA))
    adapters = [None, *(LoRARequest(name, n, str(path)) for n, (name, path) in enumerate(paths.items(), 1))]
    adaptive = given.method != "none" and not given.paths
    flags = {
        **MANY,
        "speculative": given,
        "adaptive": adaptive,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 3,
    }
    drawn()
    alone = run(target, 1, COUNT, adapters=adapters, **flags)
    drawn()
    without = run(target, 1, COUNT, **flags)
    assert differing(alone, without) >= COUNT // 2, "the adapters change little"
    assert given.method == "none" or alone["accepted"] > 0 or setup in UNTRAINED
    for ranks in (2, 4):
        drawn()
        together = run(target, ranks, COUNT, adapters=adapters, **flags)
        differ = differing(alone, together)
        print(f"{setup}, adapters, {ranks} ranks: {differ} of {2 * COUNT} differ", flush=True)
        assert differ == 0
        for counted in ("hits", "preemptions", "accepted"):
            assert together[counted] == alone[counted], counted
