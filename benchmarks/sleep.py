"""``python -m benchmarks.sleep``: memory that sleep returns, seconds of sleep and wake, and of an update in place.

    python -m benchmarks.sleep --model benchmarks/shapes/qwen3-8b --head benchmarks/shapes/qwen3-8b-eagle3
    python -m benchmarks.sleep --model tiny --head tiny-eagle3 --load-format auto --max-num-seqs 4    on a CPU

Speculation (EAGLE-3, k = 3) is on. Before and after every sleep and update the same requests must give the same tokens,
with the same graphs and no pass without one. Exit code 1 if they do not, or if a bar is missed on a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from safetensors.torch import save_file

from benchmarks.command import run
from unisono import LLM, SamplingParams
from unisono.models.load.loader import checkpoint_names
from unisono.types.shared_tensor import SharedTensor

RETURNED, WAKE_SECONDS, UPDATE_SECONDS = 0.95, 2.0, 1.5
"""Bars: share of the bytes of weights and KV cache that sleep returns; seconds of a wake and of an update."""


def in_use() -> int:
    """Bytes in use on the device; on a CPU, of this process."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of a call, the device's work included."""
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


class Checked:
    """An engine whose answers and graphs must stay the same."""

    def __init__(self, llm: LLM, requests: int, tokens: int) -> None:
        self.llm, self.problems = llm, list[str]()
        vocabulary = llm.engine.checkpoint.config.vocab_size
        self._prompts: list[list[int]] = [
            [(7919 * row + 31 * at) % vocabulary for at in range(40 + row)] for row in range(requests)
        ]
        self._params = [
            SamplingParams(temperature=row % 2, seed=row, max_tokens=tokens, ignore_eos=True) for row in range(requests)
        ]
        self._tokens()  # captures what the start left out
        while llm.engine.capture_missing():
            pass
        self._expected, self._graphs = self._tokens(), set(llm.engine.runner.planner.graphs())
        self._passes = self._eager()

    def _tokens(self) -> list[list[int]]:
        return [each.outputs[0].token_ids for each in self.llm.generate(self._prompts, self._params)]

    def _eager(self) -> int:
        passes = self.llm.engine.runner.planner.passes
        return sum(count for (_, kind, _), count in passes.items() if kind == "eager")

    def check(self, after: str) -> None:
        """Compare tokens, graphs and eager passes with those of the start."""
        if self._tokens() != self._expected:
            self.problems.append(f"other tokens after {after}")
        if lost := self._graphs.difference(self.llm.engine.runner.planner.graphs()):
            self.problems.append(f"{len(lost)} graphs lost after {after}")
        if self._eager() != self._passes:
            self.problems.append(f"eager passes after {after}")


def write_weights(llm: LLM, directory: Path) -> int:
    """Write the served weights as a safetensors file, by the checkpoint's names; returns their bytes."""
    worker, checkpoint = llm.engine.worker, llm.engine.checkpoint
    tensors = {}
    for name, target in checkpoint_names(worker.model, checkpoint.family).items():
        assert tuple(target.parameter.shape) == target.shape, f"{name} is not stored as it is used"
        tensors[name] = target.parameter.detach().to("cpu", copy=True).contiguous()
    save_file(tensors, directory / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


TRAINER = """
import sys
import msgspec
from safetensors.torch import load_file
from unisono.distributed.cuda_ipc import share
held = load_file(sys.argv[1], device="cuda")
print(msgspec.json.encode({name: share(tensor) for name, tensor in held.items()}).decode(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def trainer(file: str) -> Iterator[dict[str, SharedTensor]]:
    """Tensors of a safetensors file in the GPU memory of another process."""
    command = [sys.executable, "-c", TRAINER, file]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield msgspec.json.decode(process.stdout.readline(), type=dict[str, SharedTensor])
        process.communicate("\n")


def sleep(
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")],
    head: Annotated[str, typer.Option(help="Its EAGLE-3 head.")],
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "dummy",
    max_model_len: Annotated[int, typer.Option(help="Context in tokens.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests that are compared.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 48,
    repeats: Annotated[int, typer.Option(help="Sleeps of each level.")] = 2,
    at: Annotated[Path, typer.Option(help="Directory in shared memory for pushed weights.")] = Path("/dev/shm"),
) -> None:
    """Measure sleep, wake and an update in place."""
    spec = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "adaptive": False}
    if load_format == "dummy":
        spec["load_format"] = "dummy"
    flags: dict[str, Any] = {
        "load_format": load_format, "speculative_config": spec, "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 1024, "enable_sleep_mode": True,
    }  # fmt: skip
    seconds, llm = timed(lambda: LLM(model, **flags))
    on_gpu, rows, problems = torch.cuda.is_available(), [], []
    with llm:
        print(f"start: {seconds:.1f} s on {torch.cuda.get_device_name() if on_gpu else 'a CPU'}", flush=True)
        held = llm.engine.worker.memory.nbytes
        print({name: f"{count / 1e9:.2f} GB" for name, count in held.items()}, flush=True)
        checked = Checked(llm, requests, tokens)
        for level in (1, 2) * repeats:
            before = in_use()
            slept, done = timed(lambda level=level: llm.sleep(level))
            returned = before - in_use()
            woke, _ = timed(llm.wake_up)
            checked.check(f"level {level}")
            share = returned / sum(held.values())
            rows.append([f"sleep {level}", f"{slept:.2f}", f"{woke:.2f}", f"{returned / 1e9:.2f}", f"{share:.1%}"])
            print(rows[-1], json.dumps(done), checked.problems, flush=True)
            if on_gpu and (share < RETURNED or woke > WAKE_SECONDS):
                problems.append(f"level {level}: {share:.1%} returned, woke in {woke:.2f} s")
        directory = Path(tempfile.mkdtemp(prefix="sleep-", dir=at))
        try:
            nbytes = write_weights(llm, directory)
            file = str(directory / "model.safetensors")
            for name, work in (
                ("update, named file", lambda: llm.update_weights_from_tensor([file])),
                ("update, directory", lambda: llm.update_weights(str(directory))),
                ("update, named file", lambda: llm.update_weights_from_tensor([file])),
                ("update, directory", lambda: llm.update_weights(str(directory))),
            ):
                took, _ = timed(work)
                checked.check(name)
                rows.append([name, "", f"{took:.2f}", f"{nbytes / 1e9:.2f}", f"{nbytes / took / 1e9:.1f} GB/s"])
                print(rows[-1], checked.problems, flush=True)
            if on_gpu:
                with trainer(file) as shared:
                    for name in ("update, CUDA IPC, first", "update, CUDA IPC"):
                        took, _ = timed(lambda: llm.update_weights_from_tensor(shared))
                        checked.check(name)
                        rows.append([name, "", f"{took:.2f}", f"{nbytes / 1e9:.2f}", f"{nbytes / took / 1e9:.1f} GB/s"])
                        print(rows[-1], checked.problems, flush=True)
            if on_gpu and took > UPDATE_SECONDS:
                problems.append(f"an update took {took:.2f} s")
            llm.sleep(2)
            woke, _ = timed(lambda: llm.wake_up(["weights"], reload=False))
            pushed, _ = timed(lambda: llm.update_weights_from_tensor([file]))
            pages, _ = timed(lambda: llm.wake_up(["kv_cache"]))
            checked.check("level 2 and a push")
            parts = f"{woke:.2f} weights, {pushed:.2f} push, {pages:.2f} pages"
            rows.append(["sleep 2, pushed", "", f"{woke + pushed + pages:.2f}", "", parts])
        finally:
            shutil.rmtree(directory)
    print("\n| | sleep, s | wake or update, s | GB | |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    problems += checked.problems
    print("FAILED: " + "; ".join(problems) if problems else "same tokens, same graphs, no eager pass")
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(sleep)
