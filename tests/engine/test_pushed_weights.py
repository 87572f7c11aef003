"""Weights that a trainer pushes by name: through shared memory, files and a process group. Passes that are held."""

from __future__ import annotations

import socket
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.engine.changed_weights import GREEDY, PROMPTS, answers, other, speculation
from tests.engine.helpers import engine, tokens
from unisono.distributed.weight_group import WeightGroup
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, CheckpointError, ConfigError, EngineRequest, SpeculativeConfig
from unisono.types.shared_tensor import SharedTensor

NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=2)


@pytest.fixture(scope="module")
def new(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other(qwen3, tmp_path_factory.mktemp("new") / "checkpoint")


@pytest.fixture(scope="module")
def expected(new: Path) -> list[list[int]]:
    with engine(new) as llm:
        return tokens(llm, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def served(qwen3: Path) -> Any:
    with engine(qwen3, speculative=NGRAM) as llm:
        yield llm


@pytest.fixture
def llm(served: LLM, qwen3: Path) -> Any:
    """An engine with the old weights."""
    served.update_weights(str(qwen3), version="old")
    return served


def weights(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


def test_tensors_in_parts(llm: LLM, new: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Half of the names as tensors, half as a file: then the engine answers as one started with all of them."""
    graphs = list(llm.engine.runner.planner.graphs())
    old, tensors = tokens(llm, PROMPTS, GREEDY), weights(new)
    names = sorted(tensors)
    first, rest = names[::2], names[1::2]
    done = llm.update_weights_from_tensor([(name, tensors[name]) for name in first], version="half")
    assert done["weight_version"] == llm.engine.weight_version == "half"
    assert done["freed_pages"] > 0
    half = tokens(llm, PROMPTS, GREEDY)
    assert half not in (old, expected)
    save_file({name: tensors[name] for name in rest}, tmp_path / "rest.safetensors")
    llm.update_weights_from_tensor([str(tmp_path / "rest.safetensors")])
    assert tokens(llm, PROMPTS, GREEDY) == expected
    assert list(llm.engine.runner.planner.graphs()) == graphs


def test_methods_by_name(llm: LLM, tmp_path: Path) -> None:
    """vLLM's spelling: RL libraries call the methods of all ranks by name."""
    (done,) = llm.collective_rpc(
        "update_weights", kwargs={"directory": str(llm.engine.checkpoint.path), "version": "by-name"}
    )
    assert done["weight_version"] == "by-name"
    assert len(llm.collective_rpc("reset_prefix_cache")) == 1
    with pytest.raises(CheckpointError):
        llm.collective_rpc("update_weights", args=(str(tmp_path),))
    for method in ("shutdown", "no_such_method", print):
        with pytest.raises(BadRequest, match="is not called on ranks") as refused:
            llm.collective_rpc(method)  # type: ignore[arg-type]
        assert refused.value.param == "method"
    with pytest.raises(BadRequest, match="timeout=3"):
        llm.collective_rpc("reset_prefix_cache", 3)


def test_a_failure_leaves_the_old_weights(llm: LLM, new: Path, tmp_path: Path) -> None:
    old, tensors = tokens(llm, PROMPTS, GREEDY), weights(new)
    norm = tensors["model.norm.weight"]
    for pushed, says in (
        ({"model.norm.weight": norm, "model.nowhere.weight": norm}, r"model\.nowhere\.weight .* has no place"),
        ({"model.norm.weight": norm[:-1]}, "has shape"),
        ({"model.norm.weight": norm.to(torch.int64)}, "has dtype I64"),
        ({**tensors, "model.norm.weight": torch.full_like(norm, torch.nan)}, "NaN or infinite"),
    ):
        with pytest.raises(CheckpointError, match=says):
            llm.update_weights_from_tensor(pushed)
        assert tokens(llm, PROMPTS, GREEDY) == old, says
    with pytest.raises(CheckpointError, match="no file of weights"):
        llm.update_weights_from_tensor([str(tmp_path / "missing.safetensors")])
    with pytest.raises(ConfigError, match="at least one tensor"):
        llm.update_weights_from_tensor({})
    assert llm.engine.weight_version == "old"


def sliced(name: str, tensor: torch.Tensor, dim: int, bounds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Slices of a tensor between successive bounds along a dimension, by their names."""
    before = ":, " * dim
    return {
        f"{name}[{before}{start}:{stop}]": tensor.narrow(dim, start, stop - start) for start, stop in pairwise(bounds)
    }


def test_slices(llm: LLM, new: Path, expected: list[list[int]]) -> None:
    """Slices of every tensor, by rows or columns, in one push or in several: the engine answers as with all of them."""
    tensors = weights(new)
    early: dict[str, torch.Tensor] = {}
    late: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        dim = number % tensor.dim()
        size = tensor.shape[dim]
        parts = sliced(name, tensor, dim, (0, size // 3, size // 2, size))
        if number % 4 == 3:
            early |= parts  # joined
        else:
            keys = list(parts)
            early |= {key: parts[key] for key in keys[::2]}
            late |= {key: parts[key] for key in keys[1::2]}
    old = tokens(llm, PROMPTS, GREEDY)
    llm.update_weights_from_tensor(early)
    assert tokens(llm, PROMPTS, GREEDY) not in (old, expected)
    llm.update_weights_from_tensor(late)
    assert tokens(llm, PROMPTS, GREEDY) == expected


def test_wrong_slices_leave_the_old_weights(llm: LLM, new: Path) -> None:
    old = tokens(llm, PROMPTS, GREEDY)
    norm, size = weights(new)["model.norm.weight"], len(weights(new)["model.norm.weight"])
    for name, value, says in (
        ("model.norm.weight[0:4]", norm[:5], "has shape"),
        ("model.norm.weight[0:4:2]", norm[:2], "is no slice"),
        ("model.norm.weight[:, 0:4]", norm[:4], "has shape"),
        (f"model.norm.weight[{size}:{size + 4}]", norm[:4], "beyond the tensor's shape"),
        ("model.nowhere.weight[0:4]", norm[:4], "has no place"),
        ("model.norm.weight[0:4]", norm[:4].to(torch.int64), "has dtype I64"),
    ):
        with pytest.raises(CheckpointError, match=says):
            llm.update_weights_from_tensor({name: value})
    with pytest.raises(CheckpointError, match="pushed whole and as"):
        llm.update_weights_from_tensor({"model.norm.weight": norm, "model.norm.weight[0:4]": norm[:4]})
    with pytest.raises(CheckpointError, match=r"slices of .* overlap"):
        llm.update_weights_from_tensor({"model.norm.weight[0:4]": norm[:4], "model.norm.weight[2:6]": norm[2:6]})
    assert tokens(llm, PROMPTS, GREEDY) == old


def test_slices_of_converted_weights_must_cover_them(qwen3: Path, new: Path) -> None:
    tensors = weights(new)
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight"))
    rows = len(tensors[name])
    with engine(qwen3, quantization="fp8") as llm:
        llm.update_weights_from_tensor({name: tensors[name]})
        expected = tokens(llm, PROMPTS, GREEDY)
    with engine(qwen3, quantization="fp8") as llm:
        with pytest.raises(CheckpointError, match="push slices that cover"):
            llm.update_weights_from_tensor(sliced(name, tensors[name], 0, (0, rows // 2)))
        llm.update_weights_from_tensor(sliced(name, tensors[name], 0, (0, rows // 2, rows)))
        assert tokens(llm, PROMPTS, GREEDY) == expected


def test_gpu_handles_need_a_gpu(llm: LLM) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    shared = SharedTensor("uuid", "00" * 64, 0, (4,), "float32")
    with pytest.raises(ConfigError, match="the engine runs on cpu"):
        llm.update_weights_from_tensor({"model.norm.weight": shared})


def head(llm: LLM) -> dict[str, torch.Tensor]:
    """The parameters of the drafter's module."""
    return {name: weight.clone() for name, weight in llm.engine.worker.drafter.module.named_parameters()}


def test_a_drafter_is_pushed_by_name(checkpoints_of: Any, tmp_path: Path) -> None:
    """All of a head's tensors, in two pushes: its weights are those of an engine that was started with them."""
    target, draft = checkpoints_of("eagle3")
    new = other(draft, tmp_path / "draft")
    spec, tensors = speculation("eagle3", draft), weights(new)
    del tensors["d2t"], tensors["t2d"]  # maps of token ids are no weights
    with engine(target, speculative=speculation("eagle3", new)) as llm:
        expected, trained = answers(llm), head(llm)
    with engine(target, speculative=spec) as llm:
        names = sorted(tensors)
        llm.update_weights_from_tensor({name: tensors[name] for name in names[:3]}, draft=True)
        half = head(llm)
        assert any(not torch.equal(half[name], trained[name]) for name in trained)
        llm.update_weights_from_tensor({name: tensors[name] for name in names[3:]}, draft=True, version="drafter")
        torch.testing.assert_close(head(llm), trained, rtol=0, atol=0)
        assert answers(llm) == expected
        assert llm.engine.weight_version == "drafter"
        name = next(name for name in names if tensors[name].is_floating_point())
        for pushed, says in (
            ({"model.norm.weight": tensors[name]}, "no place in the eagle3 drafter"),
            ({name: tensors[name][:-1]}, "has shape"),
            ({name: torch.full_like(tensors[name], torch.nan)}, "NaN or infinite"),
        ):
            with pytest.raises(CheckpointError, match=says):
                llm.update_weights_from_tensor(pushed, draft=True)
            torch.testing.assert_close(head(llm), trained, rtol=0, atol=0)


def test_drafters_without_weights_take_no_push(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="ngram drafter has no weights"):
        llm.update_weights_from_tensor({"fc.weight": torch.ones(1)}, draft=True)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def test_a_trainer_sends_through_a_group(llm: LLM, new: Path, expected: list[list[int]]) -> None:
    old, tensors, port = tokens(llm, PROMPTS, GREEDY), weights(new), free_port()

    def train() -> None:
        group = WeightGroup("127.0.0.1", port, 0, 2, timeout=60)
        group.send({"model.norm.weight": tensors["model.norm.weight"][:-1]})
        group.send(tensors)
        group.close()

    trainer = threading.Thread(target=train)
    trainer.start()
    llm.init_weights_update_group("127.0.0.1", port, 1, 2, backend="gloo", timeout=60)
    norm = tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="has shape"):
        llm.update_weights_from_distributed(["model.norm.weight"], ["float32"], [[len(norm) - 1]])
    assert tokens(llm, PROMPTS, GREEDY) == old
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    done = llm.update_weights_from_distributed(list(tensors), dtypes, shapes, version="step 1")
    trainer.join()
    assert done["weight_version"] == "step 1"
    assert tokens(llm, PROMPTS, GREEDY) == expected
    with pytest.raises(ConfigError, match="exists"):
        llm.init_weights_update_group("127.0.0.1", port, 1, 2, backend="gloo")
    llm.destroy_weights_update_group()
    with pytest.raises(ConfigError, match="does not exist"):
        llm.destroy_weights_update_group()


def test_wrong_groups(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="backends are gloo, nccl"):
        llm.init_weights_update_group("127.0.0.1", 1, 1, 2, backend="mpi")
    with pytest.raises(ConfigError, match="no member"):
        llm.init_weights_update_group("127.0.0.1", 1, 2, 2, backend="gloo")
    with pytest.raises(ConfigError, match="did not meet"):
        llm.init_weights_update_group("127.0.0.1", free_port(), 1, 2, backend="gloo", timeout=1)
    with pytest.raises(ConfigError, match="1 names, 2 dtypes"):
        llm.update_weights_from_distributed(["a"], ["float32", "float32"], [[1]])


def test_no_store_connects_before_the_trainer_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store tries to connect for up to twice its timeout, and an engine computes nothing meanwhile."""
    monkeypatch.setattr(dist, "TCPStore", lambda *args: pytest.fail("the store was made without a listener"))
    with pytest.raises(ConfigError, match=r"did not meet: .*refused"):
        WeightGroup("127.0.0.1", free_port(), 1, 2, timeout=0.5)


def test_paused_requests_keep_all_tokens(llm: LLM, new: Path) -> None:
    """Held passes launch nothing; an update in between; then every request has all of its tokens."""
    said: dict[str, list[int]] = {f"r{number}": [] for number in range(len(PROMPTS))}
    for name, prompt in zip(said, PROMPTS, strict=True):
        llm.engine.add(EngineRequest(name, list(prompt), GREEDY))

    def step() -> int:
        deltas = llm.engine.step()
        for delta in deltas:
            said[delta.request_id] += delta.token_ids
        return len(deltas)

    for _ in range(3):
        step()
    llm.pause_generation()
    step()  # hands out the pass that was in flight
    kept = {name: list(one) for name, one in said.items()}
    assert llm.engine.has_work()
    assert [step() for _ in range(3)] == [0, 0, 0]
    llm.update_weights_from_tensor(weights(new))
    assert step() == 0
    llm.continue_generation()
    while llm.engine.has_work():
        step()
    llm.engine.check_integrity()
    for name, one in said.items():
        assert one[: len(kept[name])] == kept[name]
        assert len(one) == GREEDY.max_tokens
