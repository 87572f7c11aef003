"""Kernels that do the work of several, against those that they replace: the same bits? How much time?

    python -m benchmarks.kernel_fusions                          everything, as Markdown: some 10 minutes on an H200
    python -m benchmarks.kernel_fusions --only kernels attention
    python -m benchmarks.kernel_fusions --only rounds --models 8b-fp8 9b
    python -m benchmarks.kernel_fusions --tiny                   small sizes on a CPU, without times: tries this file

*kernels*: µs of a launch, medians over replays of a CUDA graph of several of them on different data. *attention*: one
layer of long prompts with heads of 256, by the Triton kernel and by both shapes of the one for Hopper. *launches*: of a
round of a small model of each kind, counted without a GPU. *rounds*: ms of a round and of a first token of dummy models
through the engine, with the fused kernels and without, each in a process of its own; a process also says which
kernels its start found exact.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from benchmarks import with_without  # noqa: E402
from benchmarks.experts import graph_us  # noqa: E402
from unisono.kernels.attention import hopper as attention_hopper  # noqa: E402
from unisono.kernels.gemm.fp8_quantize import launch_quantize  # noqa: E402
from unisono.kernels.moe.combine import launch_combine  # noqa: E402
from unisono.kernels.norm.activation import (  # noqa: E402
    launch_sigmoid_gate,
    launch_sigmoid_gate_fp8,
    launch_silu_mul,
    launch_silu_mul_fp8,
)
from unisono.kernels.norm.gated_norm import launch_gated_norm, launch_gated_norm_fp8  # noqa: E402
from unisono.kernels.norm.rms_norm import launch_add_rms_norm, launch_add_rms_norm_fp8  # noqa: E402
from unisono.layers.formats.experts_quantised import Fp8Experts  # noqa: E402
from unisono.layers.formats.fp8 import _Fp8  # noqa: E402

DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float16)
ROWS = (1, 16, 64, 2048, 8192)
SHAPES = Path(__file__).parent / "shapes"
MODELS = {
    "8b-fp8": ("qwen3-8b", "fp8"), "9b": ("qwen3.5-9b", None), "9b-fp8": ("qwen3.5-9b", "fp8"),
    "35b": ("qwen3.5-35b-a3b", None), "35b-fp8": ("qwen3.5-35b-a3b", "fp8"),
}  # fmt: skip
Step = Callable[[int], object]
"""Runs on the data of a number."""


def random(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype or DTYPE)


def same(one: object, other: object) -> bool:
    """Whether tensors in lists, or tensors, have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return all(map(same, one, other))


def compared(name: str, rows: object, before: Step, after: Step, results: Callable, copies: int) -> list[object]:
    """A line of the table. results: what of both is compared."""
    equal = same(results(before(0)), results(after(0)))
    if not ON_GPU:
        return [name, rows, "-", "-", "-", equal]
    old, new = (graph_us([partial(run, number) for number in range(copies)]) for run in (before, after))
    again = graph_us([partial(before, number) for number in range(copies)])
    return [name, rows, f"{old:.2f} ({again:.2f} again)", f"{new:.2f}", f"{old - new:.2f}", equal]


# ---- kernels ------------------------------------------------------------------------------------------


def kernels(tiny: bool) -> Iterator[list[object]]:
    """[kernel, rows, µs before, µs after, saved, same bits]."""
    for rows in (3, 8) if tiny else ROWS:
        copies = max(1, min(24, 4096 // rows))
        yield from _dense(rows, copies, *((200, 300) if tiny else (4096, 12288)))
        yield from _of_experts(rows, copies, 256 if tiny else 2048, 2 if tiny else 8)


def _dense(rows: int, copies: int, hidden: int, inner: int) -> Iterator[list[object]]:
    """What a layer of an 8B launches between its products, and a hybrid's gates."""
    x, r = ([random(rows, hidden) for _ in range(copies)] for _ in range(2))
    up = [random(rows, 2 * inner) for _ in range(copies)]
    z = [random(rows, 3 * hidden) for _ in range(copies)]
    w, heads = random(hidden), 8

    def norm(i: int) -> list[torch.Tensor]:
        total, normed = launch_add_rms_norm(x[i], r[i], w, 1e-6)
        return [total, *launch_quantize(normed, 128)]

    def fused_norm(i: int) -> list[torch.Tensor]:
        total, _, *quantised = launch_add_rms_norm_fp8(x[i], r[i], w, 1e-6, 128, False)
        return [total, *quantised]

    each = {
        "add, norm": (norm, fused_norm),
        "SiLU·up": (lambda i: launch_quantize(launch_silu_mul(up[i]), 128), lambda i: launch_silu_mul_fp8(up[i], 128)),
        "sigmoid gate": (
            lambda i: launch_quantize(launch_sigmoid_gate(x[i], z[i], heads), 128),
            lambda i: launch_sigmoid_gate_fp8(x[i], z[i], heads, 128),
        ),
    }
    if hidden % 128 == 0 and hidden // 8 >= 16:
        of_head = random(128, dtype=torch.float32).abs()  # rows of padding may hold -0 for one weight, 0 for another
        each["gated norm"] = (
            lambda i: launch_quantize(launch_gated_norm(x[i], z[i][:, :hidden], of_head, 1e-6), 128),
            lambda i: launch_gated_norm_fp8(x[i], z[i][:, :hidden], of_head, 1e-6, 128),
        )
    for name, (before, after) in each.items():
        yield compared(f"{name}, quantised", rows, before, after, list, copies)


def _of_experts(rows: int, copies: int, hidden: int, top_k: int) -> Iterator[list[object]]:
    y = [random(rows * top_k, hidden) for _ in range(copies)]
    shared, residual, w = random(rows, hidden), random(rows, hidden), random(hidden, dtype=torch.float32)
    weights, gates = torch.rand(rows, top_k, device=DEVICE), torch.rand(rows, device=DEVICE)
    rest = weights, shared, gates, residual, w, 1e-6

    def before(i: int) -> list[torch.Tensor]:
        total, normed, *_ = launch_combine(y[i], *rest)
        return [total, normed, *launch_quantize(normed, 128)]

    yield compared("experts' sum, quantised", rows, before, lambda i: launch_combine(y[i], *rest, 128), list, copies)


# ---- attention ----------------------------------------------------------------------------------------


def attention(tiny: bool) -> Iterator[list[object]]:
    """[heads, tokens, µs and TFLOP/s of the Triton kernel, of each shape of the other with its bits]."""
    if tiny:
        yield ["only on a GPU", "", "", "", "", ""]
        return
    from benchmarks.attention import Heads, Paged, flops
    from unisono.attention.triton import TritonAttention
    from unisono.kernels.attention.paged import launch_attention
    from unisono.kernels.attention.triton_kernels import LOG2_E

    for heads in (Heads("9B", 16, 4, 256), Heads("35B-A3B", 16, 2, 256)):
        for tokens in (2048, 8192):
            paged, q = Paged([tokens], 2, heads), heads.queries(tokens)
            inputs = paged.extend_inputs([(0, 0, tokens)])
            backend = TritonAttention(heads.query, heads.kv, "cuda")
            backend.plan(inputs)
            plan, scale = inputs.plan, heads.dim**-0.5

            def triton(i: int, given=(q, paged, inputs, plan, scale)) -> torch.Tensor:
                q, paged, inputs, plan, scale = given
                k, v, *_ = paged.caches[i]
                return launch_attention(q, k, v, paged.table, inputs.positions, *plan, scale, 0)

            def gluon(i: int, given=(q, paged, inputs, plan, scale), **tuning: int) -> torch.Tensor:
                q, paged, inputs, plan, scale = given
                k, v, *_ = paged.caches[i]
                where = paged.table, inputs.positions, plan.work, plan.num_items
                return attention_hopper.launch_prompt_attention(q, k, v, *where, scale * LOG2_E.value, 64, **tuning)

            with mock.patch.object(attention_hopper, "serves", return_value=False):
                want = triton(0)
                cells = [us_and_rate(graph_us([partial(triton, i) for i in range(2)]), flops(tokens, heads=heads))]
            for stages in (3, 2):
                tuning = {"STAGES": stages}
                try:
                    equal = same(gluon(0, **tuning), want)
                    us = graph_us([partial(gluon, i, **tuning) for i in range(2)])
                    cells.append(f"{us_and_rate(us, flops(tokens, heads=heads))} {'same' if equal else 'OTHER BITS'}")
                except Exception as error:  # a shape that does not fit says so
                    cells.append(type(error).__name__)
            yield [heads.name, tokens, *cells]


def us_and_rate(us: float, operations: float) -> str:
    return f"{us:.0f} ({operations / us / 1e6:.0f})"


# ---- launches -----------------------------------------------------------------------------------------


def launches(tiny: bool) -> Iterator[list[object]]:
    """[model, launches of a round before, after], of small models of four layers."""
    code = "import tests.models.count_launches as c; c.main()"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if made.returncode:
        yield [made.stderr.strip().splitlines()[-1], "", ""]
        return
    yield from (json.loads(line) for line in made.stdout.splitlines() if line.startswith("["))


# ---- rounds -------------------------------------------------------------------------------------------


def one_by_one() -> ExitStack:
    """While it is open nothing that this file measures serves."""
    stack = ExitStack()
    for kind in (_Fp8, Fp8Experts):
        stack.enter_context(mock.patch.object(kind, "input_format", return_value=None))
    suits = attention_hopper.suits
    stack.enter_context(mock.patch.object(attention_hopper, "suits", lambda *heads: heads[2] == 128 and suits(*heads)))
    return stack


def measure(model: str, fused: bool, tiny: bool) -> dict[str, object]:
    """ms of rounds and first tokens of one model in this process."""
    from unisono import LLM
    from unisono.types import SpeculativeConfig

    shape, quantization = ("tiny-hybrid", "fp8") if tiny else (str(SHAPES / MODELS[model][0]), MODELS[model][1])
    longest = 256 if tiny else 9000
    flags = {} if tiny else {"load_format": "dummy"}
    with ExitStack() if fused else one_by_one():
        llm = LLM(
            shape, quantization=quantization, max_num_seqs=64 if not tiny else 2, max_model_len=longest,
            speculative=SpeculativeConfig("none"), **flags,
        )  # fmt: skip
        batches, lengths = ((1,), (64,)) if tiny else ((1, 4, 16, 64), (128, 2048, 8192))
        return with_without.figures(llm, tiny, 60 if tiny else 900, batches, lengths)


def rounds(models: list[str], tiny: bool) -> Iterator[list[object]]:
    """See ``with_without.rounds``: before / after."""
    ways = [flags + ["--tiny"] * tiny for flags in ([], ["--fused"])]
    named = ["tiny-hybrid"] if tiny else models
    yield from with_without.rounds("kernel_fusions", named, ways, "attention of long prompts")


def table(title: str, columns: str, rows: Iterator[list[object]]) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield f"| {columns} |"
    yield f"|{'---|' * (columns.count('|') + 1)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("kernels", "attention", "launches", "rounds")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8b-fp8", "9b", "35b", "35b-fp8"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--fused", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.fused, given.tiny)), flush=True)
        return
    shapes = "3 stages | 2 stages"
    found = {
        "kernels": ("kernel | rows | µs before | after | saved | same bits", partial(kernels, given.tiny)),
        "attention": (f"heads | tokens | µs (TFLOP/s), Triton | {shapes}", partial(attention, given.tiny)),
        "launches": ("a round of | launches before | after", partial(launches, given.tiny)),
        "rounds": (
            "model | ms a round, before / after | first token | answers that differ",
            partial(rounds, given.models, given.tiny),
        ),
    }
    report("kernel_fusions", found, given.only, given.out)


def report(
    name: str, sections: dict[str, tuple[str, Callable[[], Iterator[list[object]]]]], only: list[str], out: Path | None
) -> None:
    """Print tables, of which each row is measured when it is printed. sections: their columns and rows by title."""
    lines = []
    torch.manual_seed(0)
    with torch.inference_mode():
        for section in only:
            columns, run = sections[section]
            for line in table(section, columns, run()):
                print(line, flush=True)
                lines.append(line)
    if out:
        out.write_text("\n".join([f"`python -m benchmarks.{name} {' '.join(sys.argv[1:])}`", *lines, ""]))


if __name__ == "__main__":
    main()
