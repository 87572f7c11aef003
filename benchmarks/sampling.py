"""Sampling on the GPU: is it right, does a row depend on its company, how fast is it?

    python -m benchmarks.sampling             checks, then µs per round (markdown)
    python -m benchmarks.sampling --sweep     launch options of the kernels

V = 151936, bf16 logits. "text" logits fall with the rank as words do (p ~ rank^-1.2), "flat" ones are normal.
Times are medians of CUDA graph replays, 20 calls to a graph.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from unisono.kernels.sampling import noise
from unisono.kernels.sampling import sampler as sampling
from unisono.kernels.speculation.rounds import commit, round_inputs
from unisono.sampling.pipeline import pick

VOCAB, CALLS, FAR = 151936, 20, 4096
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "T = 1": {},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}
FLOATS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
INTS = {"length": 100, "limit": FAR, "status": 0, "last_token": 1, "top_k": 0, "seed_lo": 1, "seed_hi": 2}


class Fields:
    """Slots of one setting: strided views of an arena, as the engine's."""

    def __init__(self, rows: int, device: str = "cuda", **setting: float) -> None:
        arena = torch.full((rows, len(FLOATS) + len(INTS) + 16), -1, dtype=torch.int32, device=device)
        for i, (name, value) in enumerate((FLOATS | INTS).items()):
            view = arena[:, i].view(torch.float32) if name in FLOATS else arena[:, i]
            setattr(self, name, view.fill_(setting.get(name, value)))
        self.seed_lo += torch.arange(rows, dtype=torch.int32, device=device)
        self.stop_ids = arena[:, -16:]
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.page_table = torch.ones(rows, FAR // 16, dtype=torch.int32, device=device)
        self.history = torch.zeros(rows, FAR, dtype=torch.int32, device=device)


def make_logits(kind: str, rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, device="cuda")
    if kind == "text":
        rank = logits.argsort(-1).argsort(-1) + 1
        logits = 25 - 1.2 * rank.log() + 0.3 * torch.randn_like(logits)
    return logits.to(dtype)


@triton.jit
def _philox_kernel(out, word: tl.constexpr):
    c = tl.full((1,), word, tl.uint32)
    words = noise.philox(c, c, c, c, c, c)
    for i in tl.static_range(4):
        tl.store(out + i + tl.arange(0, 1), words[i].to(tl.int64))


def check_philox() -> str:
    out = torch.empty(4, dtype=torch.int64, device="cuda")
    for word in (0, 0xFFFFFFFF):
        _philox_kernel[(1,)](out, word)
        if tuple(out.tolist()) != noise.philox_cpu(*[word] * 6):
            raise SystemExit(f"philox({word:#x}) = {[f'{w:08x}' for w in out.tolist()]}")
    return "philox words: as published"


def check_twin(rows: int = 64) -> str:
    """The GPU's tokens against the CPU twin's, on the same fp32 logits."""
    same = total = 0
    for kind, setting in itertools.product(("text", "flat"), SETTINGS.values()):
        logits = make_logits(kind, rows, torch.float32)
        on_gpu = pick(logits, Fields(rows).slots, 1, Fields(rows, **setting))
        on_cpu = pick(logits.cpu(), Fields(rows, "cpu").slots, 1, Fields(rows, "cpu", **setting))
        same += int((on_gpu.cpu() == on_cpu).sum())
        total += rows
    return f"GPU tokens = CPU twin's: {same} of {total}"


def check_rows(rows: int = 64) -> str:
    """Every row alone and as part of a wider round picks what it picks in the batch."""
    other = 0
    for kind, setting in itertools.product(("text", "flat"), SETTINGS.values()):
        logits, f = make_logits(kind, rows), Fields(rows, **setting)
        whole = pick(logits, f.slots, 1, f)
        alone = torch.cat([pick(logits[i : i + 1], f.slots[i : i + 1], 1, f) for i in range(rows)])
        wide = pick(logits.repeat_interleave(3, 0), f.slots, 3, f)[::3]
        other += int((whole != alone).sum()) + int((whole != wide).sum())
    return f"rows that change alone or in a wider round: {other} of {2 * rows * 2 * len(SETTINGS)}"


def check_distribution(vocab: int = 200, slots: int = 1000, width: int = 500) -> str:
    """Pearson's chi-square of half a million draws against float64: the least p-value over the settings."""
    values = {}
    for name, setting in list(SETTINGS.items())[1:]:
        logits = torch.randn(vocab, device="cuda") * 2
        f = Fields(slots, **setting)
        f.seed_hi += len(values)
        tokens = pick(logits.expand(slots * width, vocab).contiguous(), f.slots, width, f)
        parameters = [getattr(f, n)[:1].cpu() for n in ("temperature", "top_k", "top_p", "min_p")]
        kept = logits.cpu() >= sampling.thresholds_cpu(logits[None].cpu(), *parameters)
        p = logits.cpu().double().masked_fill(~kept, -torch.inf).softmax(0)
        counts, expected = tokens.cpu().long().bincount(minlength=vocab), p[kept] * len(tokens)
        statistic = ((counts[kept] - expected) ** 2 / expected).sum()
        freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
        values[name] = 0.0 if counts[~kept].any() else float(torch.special.gammaincc(freedom, statistic / 2))
    return f"chi-square p-values, {slots * width} draws: " + ", ".join(f"{n} {v:.3f}" for n, v in values.items())


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a call inside a CUDA graph of CALLS of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times[5:])


def timed_round(kind: str, setting: dict, rows: int, width: int, whole: bool = True) -> float:
    """µs of round_inputs + sample + commit, or of ``sample`` alone."""
    logits, f = make_logits(kind, rows * width), Fields(rows, **setting)
    drafts = torch.full((rows, width - 1), -1, dtype=torch.int32, device="cuda")

    def call() -> None:
        if whole:
            round_inputs(f.slots, drafts, f.length, f.limit, f.status, f.last_token, f.page_table, 16)
        tokens = pick(logits, f.slots, width, f)
        if whole:
            sampled = tokens.view(rows, width)
            state = (f.length, f.limit, f.status, f.last_token, f.stop_ids, f.history)
            commit(sampled, drafts, f.slots, *state)

    return microseconds(call)


def table() -> None:
    shapes = [(1, 1), (4, 1), (16, 1), (64, 1), (1, 6), (16, 6)]
    print("\nround_inputs + sample + commit, µs\n")
    print("| logits | setting | " + " | ".join(f"{r} × {w}" for r, w in shapes) + " |")
    print("|---|---|" + "---|" * len(shapes))
    for kind, (name, setting) in itertools.product(("text", "flat"), SETTINGS.items()):
        cells = [f"{timed_round(kind, setting, rows, width):.1f}" for rows, width in shapes]
        print(f"| {kind} | {name} | " + " | ".join(cells) + " |", flush=True)


def sweep() -> None:
    print("\nsample alone, µs, by launch options\n")
    for lanes, warps in ((4096, 16), (8192, 16), (8192, 32), (16384, 32)):
        sampling.FILTER_LANES, sampling.FILTER_WARPS = lanes, warps
        cells = [(kind, name, timed_round(kind, SETTINGS[name], 1, 1, whole=False))
                 for kind in ("text", "flat") for name in ("top-p 0.9", "top-k 50, top-p 0.9")]  # fmt: skip
        print(f"filter lanes {lanes} warps {warps}: " + ", ".join(f"{k} {n} {t:.1f}" for k, n, t in cells), flush=True)
    for block, warps in ((512, 4), (1024, 4), (2048, 4), (4096, 8), (8192, 8), (8192, 16)):
        sampling.ARGMAX_BLOCKS = {1 << 30: (block, warps)}
        cells = [(name, rows, timed_round("text", SETTINGS[name], rows, 1, whole=False))
                 for name in ("greedy", "T = 1") for rows in (1, 16, 64, 256)]  # fmt: skip
        print(
            f"pick block {block}, warps {warps}: " + ", ".join(f"{n} {r} rows {t:.1f}" for n, r, t in cells), flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="time launch options instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.sweep:
        sweep()
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}\n")
    for check in (check_philox, check_twin, check_rows, check_distribution):
        print("*", check(), flush=True)
    table()


if __name__ == "__main__":
    main()
