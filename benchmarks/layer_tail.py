"""What follows a layer's mixer: one launch against separate launches. The same bits? How much time?

    python -m benchmarks.layer_tail                                kernels and rounds, as Markdown: some 4 minutes
    python -m benchmarks.layer_tail --only kernels --shapes 8b 9b
    python -m benchmarks.layer_tail --only rounds --models qwen3-8b
    python -m benchmarks.layer_tail --tiny                         on a CPU, without times of kernels: tries this file

*kernels*: µs of a layer's tail, the median over replays of a CUDA graph of several layers (their weights together are
larger than the L2), by rows and by steps that are loaded together. *floor*: its weights at 4.68 TB/s. *rounds*: ms of
rounds and first tokens of dummy models through the engine, each way in a process of its own, and answers that differ.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
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
from benchmarks.kernel_fusions import report  # noqa: E402
from unisono.entrypoints.llm import LLM  # noqa: E402
from unisono.kernels.gemm import layer_tail as plain  # noqa: E402
from unisono.types import SpeculativeConfig  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
FOLDER = Path(__file__).parent / "shapes"
SHAPES = {  # h, q, i, f, norms in fp32
    "8b": (4096, 4096, 12288, 6144, False),
    "9b": (4096, 4096, 12288, 12352, True),
}
LAYERS, BANDWIDTH = 10, 4.68e12
ROWS = (1, 4, 8, 16, 32)
LAUNCHES = {  # options of the kernels' launches
    "overlap": {"OVERLAP": True, "launch_pdl": True},
    "plain": {"OVERLAP": False},
    "cooperative": {"OVERLAP": False, "launch_cooperative_grid": True},
}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def made(h: int, q: int, i: int, f: int, fp32: bool) -> plain.LayerTailWeights:
    """A layer's weights."""
    sizes = (h, q), (2 * i, h), (h, i), (f, h)
    norms = [random(h, dtype=torch.float32 if fp32 else torch.bfloat16) for _ in range(2)]
    weights = [random(n, k) * k**-0.5 for n, k in sizes]
    return plain.LayerTailWeights(*weights[:3], norms[0], 1e-6, norms[1], 1e-6, weights[3])


def kernels(shapes: list[str], rows: tuple[int, ...]) -> Iterator[list[object]]:
    """[shape, rows, floor, µs of separate launches, of one by steps loaded together, whether bits are equal]."""
    for shape in shapes:
        h, q, i, f, fp32 = SHAPES[shape] if ON_GPU else (512, 256, 384, 384, False)
        tails = [made(h, q, i, f, fp32) for _ in range(LAYERS if ON_GPU else 1)]
        floor = sum(w.numel() * w.element_size() for w in tails[0].products) / BANDWIDTH * 1e6
        for count in rows:
            x, residual = random(count, q), random(count, h)
            if not ON_GPU:
                yield [shape, count, f"{floor:.1f}", "", "", ""]
                continue
            yield [shape, count, f"{floor:.1f}", *compared(tails, x, residual)]


def compared(tails: list[plain.LayerTailWeights], x: torch.Tensor, residual: torch.Tensor) -> list[object]:
    before = graph_us([partial(plain._apart, x, residual, tail) for tail in tails])
    expected, found, same = plain._apart(x, residual, tails[0]), [], True
    for each in (2, 4, 8):
        blocks, launch = plain.Blocks.of(len(x), each), plain.launch_layer_tail
        same &= all(map(torch.equal, launch(x, residual, tails[0], blocks), expected))
        found.append(f"{graph_us([partial(launch, x, residual, tail, blocks) for tail in tails]):.1f}")
    return [f"{before:.1f}", " / ".join(found), "yes" if same else "NO"]


def measure(model: str, apart: bool, tiny: bool) -> dict[str, object]:
    """Of one model through the engine."""
    name, _, quantization = model.partition(":")
    flags = {"max_num_batched_tokens": 64} if tiny else {"load_format": "dummy"}
    with ExitStack() as stack:
        if apart:
            stack.enter_context(mock.patch("unisono.models.blocks.layer_tails._tail", return_value=None))
        llm = LLM(
            name if tiny else str(FOLDER / name), quantization=quantization or None, max_num_seqs=2 if tiny else 32,
            max_model_len=256 if tiny else 8320, speculative=SpeculativeConfig("none"), **flags,
        )  # fmt: skip
        batches, lengths = ((1,), (64,)) if tiny else ((1, 4, 8, 16, 32), (128, 2048, 8192))
        return with_without.figures(llm, tiny, 60 if tiny else 600, batches, lengths)


def rounds(models: list[str], tiny: bool) -> Iterator[list[object]]:
    """See ``with_without.rounds``: apart / together."""
    ways = [flags + ["--tiny"] * tiny for flags in (["--apart"], [])]
    yield from with_without.rounds("layer_tail", ["tiny"] if tiny else models, ways, "what follows a mixer", 150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("kernels", "rounds"), default=("kernels", "rounds"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--launch", choices=LAUNCHES, default="overlap", help="how kernels are launched")
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3.5-9b"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.apart, given.tiny)), flush=True)
        return
    found = {
        "kernels": ("shape | rows | floor, µs | apart | together, 2 / 4 / 8 steps at once | same bits",
                    partial(kernels, given.shapes, tuple(given.rows))),
        "rounds": ("model | ms a round, apart / together | first token | answers that differ",
                   partial(rounds, given.models, given.tiny)),
    }  # fmt: skip
    with mock.patch.object(plain, "overlapped", return_value=LAUNCHES[given.launch]):
        report("layer_tail", found, given.only, given.out)


if __name__ == "__main__":
    main()
